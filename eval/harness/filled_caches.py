"""Caches that hold a long context which no model has read: the states of a short text, repeated.

Reading 16384 tokens takes minutes and has no part in what a decode step costs. The repeated keys keep the positions
that they were read at, and caches that code a prompt by its queries see none: no time depends on either.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.models.cache_argument import as_argument


States = Sequence[tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def read_states(network: PreTrainedModel, token_ids: torch.Tensor) -> States:
    """Keys and values of every layer, `[B, H, T, D]`, of the tokens `[B, T]`."""
    cache = DynamicCache(config=network.config)
    network(token_ids, **as_argument(cache), logits_to_keep=1)
    states = []
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None or layer.values is None:
            raise ValueError("a model whose layers have no keys and values cannot be given any")
        states.append((layer.keys, layer.values))
    return states


@torch.inference_mode()
def fill_cache(cache: Cache, states: States, context: int, batch_size: int = 1) -> None:
    """Has `cache` hold `context` tokens, `states` repeated as often as need be, in each of `batch_size` items."""
    layers: list[Any] = cache.layers
    for index, sides in enumerate(states):
        keys, values = (repeat_states(side, context) for side in sides)
        if not isinstance(cache, InfiniGenCache):
            cache.update(keys, values, index)
            continue
        # Its hooks have announced no layer, which `cache.update` would refuse
        layers[index].update(keys, values)
        if isinstance(layers[index], InfiniGenLayer):
            layers[index].settle_prompt()
    if batch_size > 1:
        cache.batch_repeat_interleave(batch_size)


def repeat_states(states: torch.Tensor, context: int) -> torch.Tensor:
    """States `[B, H, T, D]` as often as it takes for `context` tokens, those beyond them left out."""
    times = -(-context // states.shape[2])
    return states.repeat(1, 1, times, 1)[:, :, :context].contiguous()
