"""The search ends at the largest batch that fits, and says so when time ends it before."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.gpu.memory_parts import Budget, find_largest, measure_largest_batch, run_batch
from kvcache_plugins.eval.gpu.report import TimeBox, TimeIsUpError


CONTEXT, STEPS = 64, 3


@pytest.mark.parametrize("largest", [0, 1, 37, 64])
@pytest.mark.parametrize("first", [1, 40, 64])
def test_the_search_finds_what_fits(largest, first):
    tried = []

    def try_batch(size):
        tried.append(size)
        return {"largest_batch": size} if size <= largest else None

    row = find_largest(try_batch, first, 65, TimeBox(60.0), precision=0.0)
    assert len(tried) == len(set(tried)) <= 8
    trials = [[size, size <= largest] for size in tried]
    assert row == ({"largest_batch": largest, "trials": trials, "search": "complete"} if largest else None)


def test_precision_saves_trials():
    row = find_largest(lambda size: {"size": size} if size <= 990 else None, 900, 1001, TimeBox(60.0), precision=0.1)
    # Between 950 and 1001 there are fewer than a tenth of 950
    assert row["trials"] == [[900, True], [950, True]]
    assert row["search"] == "complete"


def test_time_cuts_a_search_short():
    class Box(TimeBox):
        left = 0.0

    row = find_largest(lambda size: {"largest_batch": size}, 4, 100, Box(0.0))
    assert row == {"largest_batch": 4, "trials": [[4, True]], "search": "cut short: time"}
    with pytest.raises(TimeIsUpError):
        find_largest(lambda size: None, 50, 100, Box(0.0))


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
        return measure_largest_batch(tiny_llama, create, CONTEXT, STEPS, budget, TimeBox(60))["largest_batch"]

    assert largest("dynamic") == 2 < largest("gear-2bit")
