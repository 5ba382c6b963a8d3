"""Observers of InfiniGen caches: hits are counted against the true weights."""

import torch

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.eval.observers import HitCounter


TENTH = {"alpha": float("inf"), "max_fetch_ratio": 0.1, "full_layers": (0,), "sink": 0, "recent": 1}


@torch.no_grad()
def count(model, **options: object) -> tuple[HitCounter, int]:
    """Hits of ten steps behind a padded batch, and the tokens that the cache says it fetched."""
    ids = torch.randint(3, 128, (2, 210), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    with InfiniGenCache(model, **TENTH, **options) as cache:
        counter = HitCounter(cache)
        model(ids[:, :200], attention_mask=mask[:, :200], past_key_values=cache)
        for length in range(201, 211):
            model(ids[:, length - 1 : length], attention_mask=mask[:, :length], past_key_values=cache)
        return counter, cache.stats()["tokens_fetched"]


def test_tokens_chosen_by_exact_scores_are_hits(tiny_llama) -> None:
    """All but few: weights of a choice count the newest tokens too, which changes the mean over query heads."""
    counter, fetched = count(tiny_llama, speculate=False, partial_ratio=1.0)
    assert 0.95 * counter.possible < counter.hits <= counter.possible == fetched


def test_tokens_chosen_by_few_columns_are_seldom_hits(tiny_llama) -> None:
    counter, fetched = count(tiny_llama, speculate=False, partial_ratio=0.05)
    assert counter.possible == fetched
    assert 0 < counter.hits < 0.8 * counter.possible


def test_steps_that_fit_a_prepared_call_are_counted(tiny_llama) -> None:
    ids = torch.randint(3, 128, (1, 210), generator=torch.Generator().manual_seed(0))
    with InfiniGenCache(tiny_llama, full_layers=(0,)) as cache, torch.no_grad():
        counter = HitCounter(cache)
        for part in (ids[:, :200], *ids[:, 200:].split(1, dim=1)):
            tiny_llama(part, past_key_values=cache)
        assert counter.possible == cache.stats()["tokens_fetched"] > 0
