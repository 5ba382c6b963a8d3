"""Norms of the keys and values that attention reads from a cache, over those of a dense cache, by their age."""

from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache

from kvcache_plugins.eval.harness import cache_stats, mean_by_stretch


class NormRatios(NamedTuple):
    """Norms over the dense cache's for each token, the oldest first: a mean of sequences, layers and heads."""

    keys: tuple[float, ...]
    values: tuple[float, ...]


@torch.no_grad()
def norm_ratios(cache: Cache, dense: DynamicCache) -> NormRatios | None:
    """
    Compare two caches of the same tokens. Return `None` if tokens were evicted, or if all layers keep windows, which
    are left out. Feed `cache` one token more, as an update returns the states that attention reads.
    """
    if cache_stats(cache).get("tokens_dropped"):
        return None
    by_layer = []
    layers: list[Any] = cache.layers
    exact_layers: list[Any] = dense.layers
    for layer, exact in zip(layers, exact_layers, strict=True):
        if getattr(exact, "keys", None) is None or exact.is_sliding:
            continue
        sides = (exact.keys, exact.values)
        read = layer.update(*(side[:, :, -1:] for side in sides))
        ratios = [own[:, :, :-1].norm(dim=-1) / side.norm(dim=-1) for own, side in zip(read, sides, strict=True)]
        by_layer.append(torch.stack([each.mean(dim=(0, 1)) for each in ratios]))
    if not by_layer:
        return None
    keys, values = torch.stack(by_layer).mean(dim=0).tolist()
    return NormRatios(tuple(keys), tuple(values))


def norms_by_stretch(norms: NormRatios, stretch: int) -> dict[str, list[float]]:
    """Return the means of keys and of values over stretches of tokens."""
    return {
        "key_norm_by_stretch": mean_by_stretch(norms.keys, stretch),
        "value_norm_by_stretch": mean_by_stretch(norms.values, stretch),
    }
