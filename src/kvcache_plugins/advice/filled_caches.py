"""Caches filled with the states of one dense prefill: what they would hold, and how far they stray."""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.gear import GEARCache
from kvcache_plugins.gear.config import GEARConfig
from kvcache_plugins.gear.layer import GEARLayer

from .held_out_prompt import HeldOutPrompt


# Of this many tokens groups of every usual size leave none over
_WHOLE_GROUPS = 1024
# Held-out tokens a forward through a candidate
_CHUNK = 16


def dense_states(prompt: HeldOutPrompt) -> tuple[list[object], torch.Tensor]:
    """Dense layers that hold the prefix, and logits of the held-out tokens `[batch_size, held_out, vocabulary]`."""
    dense = DynamicCache(config=prompt.config)
    prompt.feed(dense, 0, prompt.prefix_length)
    # Bounded layers forget, and may write in place: they are copied. Others are cut back, so that the prompt stands in
    # memory once.
    layers: list[object] = [layer if _is_full(layer) else copy.deepcopy(layer) for layer in dense.layers]
    logits = prompt.feed(dense, prompt.prefix_length, prompt.length)
    for layer in layers:
        if _is_full(layer) and layer.is_initialized:
            layer.crop(-prompt.held_out)
    return layers, logits


def _is_full(layer: object) -> TypeGuard[DynamicLayer]:
    return type(layer) is DynamicLayer


def bytes_held(cache: GEARCache, layers: Iterable[object]) -> int:
    """
    Bytes that the compressed layers would hold of a prompt, told from shapes alone. It is as long as the prefix,
    rounded up to what leaves no cache with a part of a group: how many tokens are exact for want of others says
    nothing of what is generated.
    """
    alike = Counter(
        (layer.keys.shape, layer.values.shape, layer.keys.dtype)
        for layer in layers
        if _is_full(layer) and layer.keys is not None and layer.values is not None
    )
    config, total = cache.gear_config, 0
    # The other is no candidate
    assert isinstance(config, GEARConfig)
    for (*shapes, dtype), count in alike.items():
        layer = GEARLayer(config, 0)
        keys, values = (
            torch.empty(
                *shape[:2], -(-shape[2] // _WHOLE_GROUPS) * _WHOLE_GROUPS, shape[3], dtype=dtype, device="meta"
            )
            for shape in shapes
        )
        layer.take_prompt(keys, values, None)
        total += count * sum(tensor.nbytes for _, tensor in layer.named_tensors())
    return total


def fill(cache: GEARCache, layers: Sequence[object], prompt: HeldOutPrompt) -> None:
    """Puts the prefix into an empty cache: compressed where the cache compresses, else a copy of the dense layer."""
    padding = prompt.padding
    within = None if padding is None else padding.clamp(max=prompt.prefix_length)
    for index, layer in enumerate(layers):
        own = cache.layers[index]
        if not isinstance(own, GEARLayer):
            cache.layers[index] = copy.deepcopy(layer)
        elif _is_full(layer) and layer.is_initialized:
            assert layer.keys is not None and layer.values is not None
            own.take_prompt(layer.keys, layer.values, within)
            # Of a short item padding may go on behind the prefix
            own.padding = padding


def mean_kl(cache: GEARCache, prompt: HeldOutPrompt, dense_logits: torch.Tensor) -> float:
    """Mean KL(dense || cache) of the held-out tokens through a filled cache."""
    total, first = 0.0, prompt.prefix_length
    for start in range(first, prompt.length, _CHUNK):
        stop = min(start + _CHUNK, prompt.length)
        logits = prompt.feed(cache, start, stop)
        # Item by item: in float64 the logits of a whole batch may be large
        for item, is_real in enumerate(prompt.is_real(start, stop)):
            exact = F.log_softmax(dense_logits[item, start - first : stop - first][is_real].double(), dim=-1)
            log_probs = F.log_softmax(logits[item][is_real].double(), dim=-1)
            total += F.kl_div(log_probs, exact, reduction="sum", log_target=True).item()
    return total / int(prompt.is_real(first, prompt.length).sum())
