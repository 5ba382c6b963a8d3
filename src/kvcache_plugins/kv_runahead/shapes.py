"""What the layers of a model hold, told by a forward over one token: no config names it for every architecture."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.models.cache_argument import as_argument

from .wire import Wire


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Rows of a layer on their way, and its sliding window, if it has one."""

    wire: Wire
    window: int | None

    def num_kept(self, position: int) -> int:
        """Tokens before `position` that any token from there on can see."""
        return position if self.window is None else min(position, self.window - 1)


# By model, so that only its first prefill pays for it
_SHAPES: weakref.WeakKeyDictionary[PreTrainedModel, list[LayerShape]] = weakref.WeakKeyDictionary()


def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """
    Rows and windows of all layers.

    Raises:
        ValueError: if the model has layers whose state is not that of attention to all tokens or to a sliding window.
    """
    shapes = _SHAPES.get(model)
    if shapes is None:
        shapes = _SHAPES[model] = _measure(model)
    return shapes


@torch.no_grad()
def _measure(model: PreTrainedModel) -> list[LayerShape]:
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    kinds = set(getattr(config, "layer_types", None) or ())
    known = kinds <= {"full_attention", "sliding_attention"}
    # What the cache would make of other kinds of layers is told by its layers' types
    known = known and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    if known:
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), **as_argument(cache), use_cache=True)
    if not known or not all(layer.is_initialized for layer in layers):
        raise ValueError(
            "`model` has to have layers of full or sliding-window attention only, each with keys and values of its "
            f"own, but is a `{type(model).__name__}` with layers of types {sorted(kinds) or 'unknown'}"
        )
    shapes = []
    for layer in layers:
        keys, values = layer.keys, layer.values
        wire = Wire(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
        shapes.append(LayerShape(wire, layer.sliding_window if layer.is_sliding else None))
    return shapes
