"""How benchmarks time: one call, to the end of what it started on a GPU, and the spread of many."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def time_call(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `function` takes on `device`, work that it leaves to a GPU included."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if is_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def time_on_gpu(function: Callable[[], Any], ahead: Callable[[], Any]) -> float:
    """
    Seconds that a GPU is busy with what `function` starts.

    `ahead` is queued before it: while the GPU does that, Python gets its launches ready, so that they are not timed
    with the work. It should also move more bytes than the GPU's cache holds, which would otherwise serve the data.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ahead()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, of fewer than three the extremes, under the names that results have."""
    if len(seconds) < 3:
        lower, median, upper = min(seconds), statistics.median(seconds), max(seconds)
    else:
        lower, median, upper = statistics.quantiles(seconds, n=4)
    return {"median_s": median, "lower_quartile_s": lower, "upper_quartile_s": upper}


def time_in_turns(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """
    Seconds of each function's calls. They take turns, so that what disturbs the machine disturbs them alike.

    Args:
        functions (`Mapping[str, Callable]`): what is timed; each is called once before that.
        device (`torch.device`): where they run.
        rounds (`int`): turns of each.
        seconds (`float`): after these no further round begins, once there were three.
    """
    for function in functions.values():
        function()
    measured: dict[str, list[float]] = {name: [] for name in functions}
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start > seconds:
            break
        for name, function in functions.items():
            measured[name].append(time_call(function, device))
    return measured
