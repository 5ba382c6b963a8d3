"""The largest batch is the first that fits of those that are tried."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.gpu.memory_parts import Budget, measure_largest_batch, run_batch
from kvcache_plugins.eval.gpu.report import TimeBox


CONTEXT, STEPS = 64, 3


@pytest.mark.parametrize("name", ["dynamic", "gear-4bit"])
def test_a_batch_that_exceeds_the_budget_does_not_fit(name, tiny_llama):
    rows = []
    for num_bytes in (10**8, 10**4):
        budget = Budget(num_bytes, torch.device("cpu"))
        with torch.inference_mode(), budget.enforce():
            rows.append(run_batch(tiny_llama, create_cache(name, tiny_llama), 3, CONTEXT, STEPS, budget))
    row, too_large = rows
    assert too_large is None and row["largest_batch"] == 3 and row["tokens_per_s"] > 0
    assert 3 * row["bytes_per_sequence"] == row["cache_bytes"] == row["peak_bytes"] <= 10**8


@torch.inference_mode()
def test_compression_makes_room_for_more(tiny_llama):
    # A dense sequence: 2 layers, keys and values, 2 heads of 32 channels in float32
    budget = Budget(2 * 2 * 2 * 2 * 32 * 4 * (CONTEXT + STEPS), torch.device("cpu"))

    def largest(name):
        create = lambda: create_cache(name, tiny_llama)  # noqa: E731
        row = measure_largest_batch(tiny_llama, create, CONTEXT, STEPS, budget, TimeBox(60))
        assert [fits for _, fits in row["trials"]] == [False] * (len(row["trials"]) - 1) + [True]
        return row["largest_batch"]

    assert largest("dynamic") == 2 < largest("gear-2bit")
