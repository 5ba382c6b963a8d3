"""The search ends at the largest batch that fits, and says so when time ends it before."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.gpu.largest_batch import WAYS, Budget, find_largest, measure_largest_batch, run_batch
from kvcache_plugins.eval.gpu.partial_report import TimeBox, TimeIsUpError


CONTEXT, STEPS = 64, 3


@pytest.mark.parametrize("largest", [1, 2, 37, 63, 64])
@pytest.mark.parametrize("first", [1, 40, 64])
def test_the_search_finds_what_fits(largest, first):
    tried = []

    def try_batch(size):
        tried.append(size)
        return {"largest_batch": size} if size <= largest else None

    row = find_largest(try_batch, first, 65, TimeBox(60.0), precision=0.0)
    assert row["largest_batch"] == largest
    assert row["search"] == "complete"
    assert row["trials"] == [[size, size <= largest] for size in tried]
    assert len(tried) == len(set(tried)) <= 8


def test_precision_saves_trials():
    row = find_largest(lambda size: {"size": size} if size <= 990 else None, 900, 1001, TimeBox(60.0), precision=0.1)
    # Between 950 and 1001 there are fewer than a tenth of 950
    assert row["trials"] == [[900, True], [950, True]]
    assert row["search"] == "complete"


def test_nothing_fits():
    assert find_largest(lambda size: None, 4, 5, TimeBox(60.0)) is None
    assert find_largest(lambda size: {}, 1, 1, TimeBox(60.0)) is None


def test_time_cuts_a_search_short():
    class Box(TimeBox):
        left = 0.0

    row = find_largest(lambda size: {"largest_batch": size}, 4, 100, Box(0.0))
    assert row == {"largest_batch": 4, "trials": [[4, True]], "search": "cut short: time"}
    with pytest.raises(TimeIsUpError):
        find_largest(lambda size: None, 50, 100, Box(0.0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["dynamic", "gear-4bit"])
def test_a_batch_that_exceeds_the_budget_does_not_fit(name, way, tiny_llama):
    fits, too_small = Budget(10**8, torch.device("cpu")), Budget(10**4, torch.device("cpu"))
    arguments = (tiny_llama, create_cache(name, tiny_llama), 3, way, CONTEXT, STEPS)
    with torch.inference_mode(), fits:
        row = run_batch(*arguments, fits)
    assert row["largest_batch"] == 3
    assert row["cache_bytes"] == row["peak_bytes"] <= 10**8
    assert row["tokens_per_s"] > 0
    arguments = (tiny_llama, create_cache(name, tiny_llama), 3, way, CONTEXT, STEPS)
    with torch.inference_mode(), too_small:
        assert run_batch(*arguments, too_small) is None


@torch.inference_mode()
def test_compression_makes_room_for_more(tiny_llama):
    # A dense sequence: 2 layers, keys and values, 2 heads of 32 channels in float32
    one = 2 * 2 * 2 * 32 * 4 * (CONTEXT + STEPS)
    budget = Budget(2 * one, torch.device("cpu"))
    largest = {}
    for name in ("dynamic", "gear-2bit"):
        row = measure_largest_batch(
            tiny_llama,
            lambda name=name: create_cache(name, tiny_llama),
            "repeated",
            CONTEXT,
            STEPS,
            budget,
            TimeBox(60),
        )
        largest[name] = row["largest_batch"]
        assert row["bytes_per_sequence"] * row["largest_batch"] == row["cache_bytes"] <= budget.num_bytes
    assert largest["dynamic"] == 2 < largest["gear-2bit"]
