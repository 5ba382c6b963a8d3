"""Perplexity against position: through the dense cache it is that of one forward, however it is fed."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.eval.measures.perplexity import measure_perplexity, score_text


def draw(length: int) -> torch.Tensor:
    return torch.randint(2, 128, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_dense_cache_scores_as_one_forward(tiny_llama: PreTrainedModel, chunk: int) -> None:
    windows = [draw(91), draw(181)[90:]]
    factory = partial(DynamicCache, config=tiny_llama.config)
    (row,) = measure_perplexity(tiny_llama, windows, {"dense": factory}, chunk=chunk, stretch=40)
    with torch.no_grad():
        losses = [
            F.cross_entropy(tiny_llama(window[None, :-1]).logits[0].double(), window[1:], reduction="none")
            for window in windows
        ]
    assert row["num_scored"] == 90
    expected = torch.stack(losses)
    assert row["ppl"] == pytest.approx(math.exp(expected.mean()), rel=1e-5)
    by_stretch = [math.exp(part.mean()) for part in expected.split(40, dim=1)]
    assert row["ppl_by_stretch"] == pytest.approx(by_stretch, rel=1e-5)
    assert len(by_stretch) == 3
    sums = [value for part in expected.split(40, dim=1) for value in part.sum(dim=1).tolist()]
    assert sorted(value for window in row["nll"] for value in window) == pytest.approx(sorted(sums), rel=1e-5)
    assert row["memory_at_end"]["total_bytes"] > 0


def test_a_lossy_cache_drifts(tiny_llama: PreTrainedModel) -> None:
    factories = {name: partial(create_cache, name, tiny_llama) for name in ("dynamic", "kivi-2bit")}
    announced: list[str] = []
    dense, lossy = measure_perplexity(tiny_llama, [draw(200)], factories, chunk=8, on_progress=announced.append)
    assert abs(lossy["ppl"] - dense["ppl"]) > 1e-2
    assert lossy["stats"]["tokens_compressed"] > 0
    assert announced == ["dynamic, window 1 of 1", "kivi-2bit, window 1 of 1"]


def test_bad_input(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`chunk` has to be at least 1 but is 0"):
        list(measure_perplexity(tiny_llama, [draw(9)], {}, chunk=0))
    cache = DynamicCache(config=tiny_llama.config)
    score_text(tiny_llama, draw(9), cache, 1)
    with pytest.raises(ValueError, match="fresh, empty cache"):
        score_text(tiny_llama, draw(9), cache, 1)
