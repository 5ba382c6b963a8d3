"""Caches filled with the states of one dense prefill: what they would hold, and how far they stray."""

import copy
from collections import Counter
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins.gear import GEARCache
from kvcache_plugins.gear.config import GEARConfig
from kvcache_plugins.gear.layer import GEARLayer
from kvcache_plugins.gear.transform.layer import TransformLayer
from kvcache_plugins.layers.listening_layer import ListeningLayer, listen

from .held_out_prompt import HeldOutPrompt


# Of this many tokens groups of every usual size leave none over
_WHOLE_GROUPS = 1024
# Held-out tokens a forward through a candidate
_CHUNK = 16


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class DensePrefill:
    """
    What a dense cache and its model made of a prompt.

    Attributes:
        layers (`list`): dense layers that hold the prefix.
        queries (`list[torch.Tensor | None]`): the newest queries of the prefix at each layer `[B, H * G, Q, D]`, where
            attention showed them.
        logits (`torch.Tensor` of shape `[batch_size, held_out, vocabulary]`): of the held-out tokens.
    """

    layers: list[object]
    queries: list[torch.Tensor | None]
    logits: torch.Tensor


def prefill_dense(prompt: HeldOutPrompt) -> DensePrefill:
    """One forward of the prompt in two parts, through a dense cache."""
    dense = DynamicCache(config=prompt.config)
    listen(dense, of_windows=True)
    prompt.feed(dense, 0, prompt.prefix_length)
    queries = [layer.queries if isinstance(layer, ListeningLayer) else None for layer in dense.layers]
    # Bounded layers forget, and may write in place: they are copied. Others are cut back, so that the prompt stands in
    # memory once.
    layers: list[object] = [
        layer if isinstance(layer, ListeningLayer) else copy.deepcopy(layer) for layer in dense.layers
    ]
    logits = prompt.feed(dense, prompt.prefix_length, prompt.length)
    for layer in layers:
        if isinstance(layer, ListeningLayer) and layer.is_initialized:
            layer.crop(-prompt.held_out)
    return DensePrefill(layers=layers, queries=queries, logits=logits)


def bytes_held(cache: GEARCache, prefill: DensePrefill) -> int:
    """
    Bytes that layers of keys and values would hold of a prompt, told from shapes alone, and what they share with all
    caches of the model. It is as long as the prefix, rounded up to what leaves no cache with a part of a group: how
    many tokens are exact for want of others says nothing of what is generated.
    """
    # Layers of a calibrated cache have rows of different sizes
    alike = Counter(
        (
            dense.keys.shape,
            dense.values.shape,
            dense.keys.dtype,
            type(own),
            getattr(own, "sliding_window", None),
            own.fixed if isinstance(own, TransformLayer) else None,
        )
        for own, dense in zip(cache.layers, prefill.layers, strict=True)
        if isinstance(dense, ListeningLayer) and dense.keys is not None and dense.values is not None
    )
    config, total = cache.gear_config, sum(cache.memory().shared.values())
    for (*shapes, dtype, kind, window, codec), count in alike.items():
        if kind is DynamicSlidingWindowLayer and window is not None:
            numbers = sum(int(shape[0] * shape[1] * shape[3]) for shape in shapes)
            total += count * numbers * min(shapes[0][2], window - 1) * dtype.itemsize
            continue
        layer: GEARLayer | TransformLayer
        if isinstance(config, GEARConfig):
            layer = GEARLayer(config, 0, sliding_window=window)
        else:
            layer = TransformLayer(config, 0, fixed=codec, sliding_window=window)
        keys, values = (
            torch.empty(
                *shape[:2], -(-shape[2] // _WHOLE_GROUPS) * _WHOLE_GROUPS, shape[3], dtype=dtype, device="meta"
            )
            for shape in shapes
        )
        layer.take_prompt(keys, values, None)
        total += count * sum(tensor.nbytes for _, tensor in layer.named_tensors())
    return total


def fill(cache: GEARCache, prefill: DensePrefill, prompt: HeldOutPrompt) -> None:
    """
    Puts the prefix into an empty cache: compressed where the cache compresses, of a window what it keeps, else a copy
    of the dense layer.
    """
    for index, (layer, queries) in enumerate(zip(prefill.layers, prefill.queries, strict=True)):
        own = cache.layers[index]
        if type(own) is DynamicSlidingWindowLayer and isinstance(layer, ListeningLayer):
            if layer.keys is not None and layer.values is not None:
                own.update(layer.keys, layer.values)
        elif not isinstance(own, GEARLayer | TransformLayer):
            cache.layers[index] = copy.deepcopy(layer)
        elif isinstance(layer, ListeningLayer) and layer.is_initialized:
            _take_prefix(own, layer, queries, prompt)


def _take_prefix(
    own: GEARLayer | TransformLayer, layer: ListeningLayer, queries: torch.Tensor | None, prompt: HeldOutPrompt
) -> None:
    assert layer.keys is not None and layer.values is not None
    padding = prompt.padding
    within = None if padding is None else padding.clamp(max=prompt.prefix_length)
    if isinstance(own, TransformLayer) and queries is not None:
        # Tables are made of queries too: as if attention had just computed with them
        own.update(layer.keys, layer.values)
        own.padding = within
        own.on_exact_attention(queries, None, is_causal=True, scale=None)
    else:
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
