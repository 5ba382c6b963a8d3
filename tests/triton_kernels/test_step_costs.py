"""Work of the host on decode steps under a stand-in for a GPU's driver, counted: no test measures time.

Counted are calls of functions (of Python and of C), operations of PyTorch and launches of a layer and step, as means
over 128 steps behind a prompt. Calls and operations are those beyond `dynamic`. First steps, which prepare launches,
are among them, and so are steps that pack tokens or find no more capacity. Running this file (`python
tests/triton_kernels/test_step_costs.py gear-2bit`) prints the counts, and with `--seconds` before the names the
microseconds of a layer and step beyond `dynamic` without its attention, median and quartiles of 9 turns.
"""

import json
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


NUM_PROMPT, NUM_STEPS, NUM_LAYERS, HEAD_DIM = 200, 128, 3, 64
# Most calls, operations and launches of a layer and step
CASES = {
    "transform": (120, 0, 2),
    "transform-16": (120, 0, 2),
    "calibrated-16": (190, 0, 6),
    "gear": (105, 0, 4.1),
    "gear-2bit": (115, 0, 4.1),
    "kivi-2bit": (115, 0, 4),
    "infinigen": (550, 22, 9),
    "infinigen-transform": (590, 20, 10),
    "h2o": (170, 65, 0),
}


class Operations(TorchDispatchMode):
    """Counts all operations of PyTorch, views and allocations too."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls of functions within the block."""

    def __init__(self):
        self.count = 0

    def _see(self, frame, event, argument):
        self.count += event in ("call", "c_call")

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)


class Microseconds:
    """Times the block."""

    def __enter__(self):
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error):
        self.count = 1e6 * (time.perf_counter() - self._start)


def make_cache(name, model):
    from kvcache_plugins import create_cache
    from kvcache_plugins.infinigen.hooks import hooks_of
    from kvcache_plugins.transform_coding.calibration import calibrate_transform

    options = {}
    if name.startswith("calibrated"):
        options["calibration"] = calibrate_transform(model, [torch.arange(200) % 32], num_draws=1)
    if name.startswith("infinigen"):
        # Speculation is the default on a GPU; all layers choose tokens
        options |= {"speculate": True, "full_layers": ()}
    with patch.object(torch.cuda, "is_available", lambda: True):
        cache = create_cache(name, model, **options)
    if name.startswith("infinigen"):
        # Kernels that do not run make other queries than attention gets
        hooks_of(model).checked.update(range(NUM_LAYERS))
    return cache


@torch.no_grad()
def count(name, counter):
    """Count what `counter` counts and launches over all steps, of a layer and step."""
    import stand_in
    from test_infinigen_steps import use_gpu_pools

    from kvcache_plugins.codecs import prompt_codec

    model = stand_in.make_model(HEAD_DIM, NUM_LAYERS, torch.bfloat16)
    totals = Counter()
    with ExitStack() as stack:
        driver = stack.enter_context(stand_in.stand_in_driver())
        # Values of a random model hardly vary, and rows that no kernel made have errors that all tokens share. Both
        # give layers means, which take other launches than text does
        stack.enter_context(patch.object(prompt_codec, "_STEADY_VALUES", 0.0))
        stack.enter_context(patch.object(prompt_codec.PromptCodec, "with_bias_correction", lambda codec, *_: codec))
        if name.startswith("infinigen"):
            use_gpu_pools(stack)
        cache = make_cache(name, model)
        ids = torch.randint(32, (1, NUM_PROMPT))
        for number in range(1 + NUM_STEPS):
            driver.launches.clear()
            with counter() as counted:
                model(ids, past_key_values=cache)
            ids = ids[:, :1]
            if number:
                totals["counted"] += counted.count
                totals["launches"] += driver.launches.total()
            for layer in cache.layers:
                if hasattr(layer, "pool"):
                    # Kept, as events of the stand-in cannot be waited for
                    layer.pool._events.clear()
    return [totals[each] / NUM_STEPS / NUM_LAYERS for each in ("counted", "launches")]


def check(names):
    """Write calls and operations beyond those of `dynamic`, and launches, a line of JSON for each name."""
    dynamic = [count("dynamic", counter)[0] for counter in (Calls, Operations)]
    for name in names:
        (calls, launches), (operations, _) = count(name, Calls), count(name, Operations)
        line = {"calls": calls - dynamic[0], "operations": operations - dynamic[1], "launches": launches}
        sys.stdout.write(json.dumps({each: round(number, 2) for each, number in line.items()}) + "\n")
        sys.stdout.flush()


def measure(names, num_turns=9):
    """Write the microseconds beyond those of `dynamic`, whose attention is left out: no preset computes its own."""
    turns = []
    for _ in range(num_turns):
        with patch.object(torch.nn.functional, "scaled_dot_product_attention", lambda query, *_, **__: query):
            dense = count("dynamic", Microseconds)[0]
        turns.append([count(name, Microseconds)[0] - dense for name in names])
    for name, times in zip(names, zip(*turns, strict=True), strict=True):
        lower, median, upper = statistics.quantiles(times)
        sys.stdout.write(f"{name}: {median:.1f} us ({lower:.1f} to {upper:.1f})\n")


@pytest.mark.slow
def test_steps_are_few_calls(run_compiling):
    lines = run_compiling(*CASES).splitlines()
    for (name, most), line in zip(CASES.items(), lines, strict=True):
        counted = json.loads(line)
        assert all(number <= bound for number, bound in zip(counted.values(), most, strict=True)), (name, counted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "--seconds":
        measure(sys.argv[2:])
    else:
        check(sys.argv[1:])
