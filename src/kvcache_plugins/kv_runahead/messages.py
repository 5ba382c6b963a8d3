"""How keys and values of a layer look on their way from rank to rank.

A row is a token: its keys and values of all heads side by side. Tokens come first, so that a rank receives the prefix
into the beginning of its buffer, writes its own tokens behind it, and sends the whole buffer on without a copy. Over a
slow link rows can be quantized: a token is rounded once, however many ranks it goes through.

Legend: B batch, H heads of keys and values, D and E their head dimensions.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.codecs.quantization import are_in_range, check_range, quantize
from kvcache_plugins.formats.bits import pack, packed_size, unpack
from kvcache_plugins.formats.groups import Grouping, dequantize
from kvcache_plugins.models.cache_argument import as_argument


HOP_NBITS = (4, 8)
_MAX_GROUP = 64
_METADATA_BYTES = 2


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Rows of a layer's tokens on their way, 4 or 8 bits a number or exact; `window` is the layer's sliding one."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    nbits: int | None = None
    window: int | None = None

    def num_kept(self, position: int) -> int:
        """Counts the tokens before `position` that any token from there on can see."""
        return position if self.window is None else min(position, self.window - 1)

    def make_rows(self, num_tokens: int, batch_size: int) -> torch.Tensor:
        """Makes uninitialized rows `[num_tokens, batch_size, num_heads, numbers or bytes]`."""
        dtype = self.dtype if self.nbits is None else torch.uint8
        shape = num_tokens, batch_size, self.num_heads, sum(self._sizes())
        return torch.empty(shape, dtype=dtype, device=self.device)

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Writes states `[B, H, tokens, D or E]` into rows; those to be quantized that do not fit float16 are a
        `ValueError`.
        """
        for own, states in zip(rows.split(self._sizes(), dim=3), (keys, values), strict=True):
            own.copy_((states if self.nbits is None else self._encode(states)).permute(2, 0, 1, 3))

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads keys `[B, H, tokens, D]` and values `[B, H, tokens, E]`: views if rows are not quantized."""
        keys, values = rows.permute(1, 2, 0, 3).split(self._sizes(), dim=3)
        if self.nbits is None:
            return keys, values
        return self._decode(keys, self.key_dim), self._decode(values, self.value_dim)

    def _sizes(self) -> list[int]:
        """Counts numbers of a token's key and value in one head; their bytes if they are quantized."""
        dims, nbits = [self.key_dim, self.value_dim], self.nbits
        if nbits is None:
            return dims
        return [packed_size(dim, nbits) + 2 * _METADATA_BYTES * (dim // _group_size(dim)) for dim in dims]

    def _encode(self, states: torch.Tensor) -> torch.Tensor:
        """Encodes states as bytes of codes, scales and zeros, `[B, H, tokens, bytes]`."""
        assert self.nbits is not None
        grouping = Grouping("token", _group_size(states.shape[3]))
        found = quantize(states.float()[:, :, None], None, self.nbits, grouping)
        codes, scale, zero = (each[:, :, 0] for each in found)
        check_range(are_in_range(scale, zero))
        return torch.cat([pack(codes, self.nbits), scale.view(torch.uint8), zero.view(torch.uint8)], dim=3)

    def _decode(self, packed: torch.Tensor, head_dim: int) -> torch.Tensor:
        assert self.nbits is not None
        size = packed_size(head_dim, self.nbits)
        metadata = packed[..., size:].chunk(2, dim=-1)
        scale, zero = (each.contiguous().view(torch.float16)[:, :, None] for each in metadata)
        codes = unpack(packed[..., :size], self.nbits, head_dim)[:, :, None]
        return dequantize(codes, scale, zero, Grouping("token", _group_size(head_dim)))[:, :, 0].to(self.dtype)


def _group_size(head_dim: int) -> int:
    return _MAX_GROUP if head_dim % _MAX_GROUP == 0 else head_dim


# By model, so that only its first prefill pays for it
_LAYOUTS: weakref.WeakKeyDictionary[PreTrainedModel, list[MessageLayout]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def message_layouts(model: PreTrainedModel) -> list[MessageLayout]:
    """
    Finds the layouts of all layers by a forward over one token: no config names them for every architecture. Layers of
    other attention than to all tokens or to a sliding window are a `ValueError`.
    """
    if model in _LAYOUTS:
        return _LAYOUTS[model]
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    kinds = set(getattr(config, "layer_types", None) or ())
    # What the cache would make of other kinds of layers is told by its layers' types
    known = kinds <= {"full_attention", "sliding_attention"}
    known = known and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    if known:
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), **as_argument(cache), use_cache=True)
    if not known or not all(layer.is_initialized for layer in layers):
        raise ValueError(
            "`model` has to have layers of full or sliding-window attention only, each with keys and values of its "
            f"own, but is a `{type(model).__name__}` with layers of types {sorted(kinds) or 'unknown'}"
        )
    _LAYOUTS[model] = [
        MessageLayout(
            num_heads=layer.keys.shape[1],
            key_dim=layer.keys.shape[3],
            value_dim=layer.values.shape[3],
            dtype=layer.keys.dtype,
            device=layer.keys.device,
            window=layer.sliding_window if layer.is_sliding else None,
        )
        for layer in layers
    ]
    return _LAYOUTS[model]
