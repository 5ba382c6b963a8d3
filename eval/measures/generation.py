"""One prompt continued through one cache: the tokens, when each arrived, and what the cache held at the end.

A streamer notes when each token arrives: the first interval is prefill, the next is a warm-up, the median of the
others is the time of a decoded token. On a CPU it is the process' own time that is counted, so that nothing else that
the machine does is taken for the cache's; on a GPU it is the time of a clock.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval.harness import cache_stats, was_exercised
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.reports.memory import MemoryReport, StatValue, measure_memory


class TokenTimer(BaseStreamer):
    """
    Notes when `generate` delivers the prompt and each token, and hands them on to another streamer, if any.

    Args:
        inner (`BaseStreamer`, *optional*): Gets everything that this one gets.
        on_token (`Callable[[], None]`, *optional*): Called at each generated token.
        clock (`Callable[[], float]`, *optional*): What seconds are read from.
    """

    def __init__(
        self,
        inner: BaseStreamer | None = None,
        on_token: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner, self.on_token, self.clock = inner, on_token, clock
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then token by token, from `generate`."""
        self.times.append(self.clock())
        if self.on_token is not None and len(self.times) > 1:
            self.on_token()
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """Takes the end of the text, from `generate`."""
        if self.inner is not None:
            self.inner.end()

    @property
    def prefill_seconds(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def seconds_per_token(self) -> float | None:
        """Median over the decoded tokens, the first of them left out as a warm-up; `None` when nothing is left."""
        intervals = [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]
        return statistics.median(intervals[1:]) if len(intervals) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """
    What one `generate` gave: new tokens; seconds from the prompt to the first of them (on a CPU of the process, all
    threads together) and the median of a decoded one, `None` for fewer than three; what the cache held at the end, its
    counters, and whether it did anything but hold exact states.
    """

    token_ids: tuple[int, ...]
    prefill_seconds: float
    seconds_per_token: float | None
    memory: MemoryReport
    stats: dict[str, StatValue]
    was_exercised: bool = True


def generate_with(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    seed: int = 42,
    streamer: BaseStreamer | None = None,
    on_token: Callable[[], None] | None = None,
) -> Generation:
    """
    Continues a prompt `[num_tokens]` through a fresh cache and times it: greedily, or sampled at a `temperature`.
    """
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be at least 1, but got {max_new_tokens}")
    if temperature is not None and temperature <= 0:
        raise ValueError(f"`temperature` must be above 0, or left out for greedy decoding, but got {temperature}")
    set_seed(seed)
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    timer = TokenTimer(streamer, on_token, clock)
    input_ids = token_ids[None].to(model.device)
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    output = model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **as_argument(cache),
        max_new_tokens=max_new_tokens,
        streamer=timer,
        **sampling,
    )
    return Generation(
        token_ids=tuple(output[0, token_ids.numel() :].tolist()),
        prefill_seconds=timer.prefill_seconds,
        seconds_per_token=timer.seconds_per_token,
        memory=measure_memory(cache),
        stats=cache_stats(cache),
        was_exercised=was_exercised(cache),
    )


def generation_fields(generation: Generation) -> dict[str, object]:
    """Lists the fields of a generation for JSON, all but its text."""
    seconds = generation.seconds_per_token
    return {
        "token_ids": list(generation.token_ids),
        "memory": memory_fields(generation.memory),
        "stats": generation.stats,
        "prefill_seconds": generation.prefill_seconds,
        "seconds_per_token": seconds,
        "tokens_per_second": 1 / seconds if seconds else None,
    }
