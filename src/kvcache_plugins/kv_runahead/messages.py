"""Messages between ranks: the keys and values of a layer, as rows of tokens.

A row holds the keys and values of all heads of one token, side by side. Tokens are the first dimension, so that a rank
receives the prefix into the beginning of a buffer, writes its own tokens behind it, and sends the whole buffer on
without a copy.

Legend: B batch, H heads of keys and values, D and E their head dimensions.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.models.cache_argument import as_argument


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """
    Rows of one layer.

    Attributes:
        num_heads, key_dim, value_dim (`int`): H, D and E.
        dtype (`torch.dtype`), device (`torch.device`): those of keys and values.
        window (`int`, *optional*): the layer's sliding window.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None

    def num_kept(self, position: int) -> int:
        """Return the number of tokens before `position` that tokens from there on can see."""
        return position if self.window is None else min(position, self.window - 1)

    def make_rows(self, num_tokens: int, batch_size: int) -> torch.Tensor:
        """Make uninitialized rows `[num_tokens, B, H, D + E]`."""
        shape = num_tokens, batch_size, self.num_heads, self.key_dim + self.value_dim
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys `[B, H, tokens, D]` and values `[B, H, tokens, E]` into rows."""
        own_keys, own_values = self.read(rows)
        own_keys.copy_(keys)
        own_values.copy_(values)

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View rows as keys `[B, H, tokens, D]` and values `[B, H, tokens, E]`."""
        keys, values = rows.permute(1, 2, 0, 3).split((self.key_dim, self.value_dim), dim=3)
        return keys, values


# Layouts by model: only its first prefill runs a forward to find them
_LAYOUTS: weakref.WeakKeyDictionary[PreTrainedModel, list[MessageLayout]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def message_layouts(model: PreTrainedModel) -> list[MessageLayout]:
    """
    Find the layouts of all layers by a forward over one token, as no config names them for every architecture.

    Raises a `ValueError` for layers whose attention is neither full nor in a sliding window.
    """
    if model not in _LAYOUTS:
        layers = _fill_layers(model)
        _LAYOUTS[model] = [_layout_of(layer) for layer in layers]
    return _LAYOUTS[model]


def _fill_layers(model: PreTrainedModel) -> Sequence[DynamicLayer]:
    """Return the layers of a dense cache that holds one token."""
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    kinds = set(getattr(config, "layer_types", None) or ())
    filled: list[DynamicLayer] = []
    # The cache may have layers that cannot take a token by `update`
    if kinds <= {"full_attention", "sliding_attention"} and all(map(_is_known, cache.layers)):
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), **as_argument(cache), use_cache=True)
        filled = [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
    if not filled or len(filled) < len(cache.layers):
        raise ValueError(
            "`model` has to have layers of full or sliding-window attention only, each with keys and values of its "
            f"own, but is a `{type(model).__name__}` with layers of types {sorted(kinds) or 'unknown'}"
        )
    return filled


def _is_known(layer: object) -> bool:
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _layout_of(layer: DynamicLayer) -> MessageLayout:
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None, "the layer is initialized"
    return MessageLayout(
        num_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        dtype=keys.dtype,
        device=keys.device,
        window=layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None,
    )
