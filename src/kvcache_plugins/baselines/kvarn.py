"""KVarN, a baseline: rotated keys and values whose variances over tokens and channels are normalized in tiles.

    tile `[G, D]` = scales of tokens `[G, 1]` * scales of channels `[1, D]` * codes

Scales of one axis are the quantizer's steps; those of the other are stored beside the codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.groups import ChunkSizes, GroupCodec, Layout, SideCodec
from kvcache_plugins.codecs.quantization import SUPPORTED_NBITS, quantize
from kvcache_plugins.formats.bits import pack
from kvcache_plugins.formats.groups import STORAGE_DTYPE, Grouping, QuantizedChunks, expand_groups
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.policies import GroupPolicy
from kvcache_plugins.option_checks import check_choice

from .coded_cache import CodedTokensCache
from .kvarn_scales import cross_scales


TILE_LENGTH = 128


@dataclass(frozen=True, eq=False)
class KVarNStates(QuantizedChunks):
    """
    Chunks of keys or values, with scales along the other axis than the groups'.

    Attributes:
        cross_scale (`torch.Tensor` of shape `[B, H, M, L, 1]` or `[B, H, M, tiles, D]`, float16): scale of a token of
            keys, or of a channel of values within a tile.
    """

    cross_scale: torch.Tensor | None = None

    token_tensors: ClassVar[tuple[str, ...]] = ("codes", "scale", "zero", "cross_scale")

    def dequantize_codes(self, tile: Mapping[str, torch.Tensor]) -> torch.Tensor:
        states = super().dequantize_codes(tile)
        return states * expand_groups(tile["cross_scale"], _across(self.grouping), states.shape)


@dataclass(frozen=True, kw_only=True)
class KVarNSideCodec(SideCodec):
    """Codec of keys or of values."""

    states_class: ClassVar[type[QuantizedChunks]] = KVarNStates

    def layout(self, batch_size: int, num_heads: int, num_chunks: int, length: int, sizes: ChunkSizes) -> Layout:
        is_channel = self.grouping.axis == "channel"
        across = (length, 1) if is_channel else (length // TILE_LENGTH, self.head_dim)
        cross_scale = (batch_size, num_heads, num_chunks, *across), STORAGE_DTYPE
        return super().layout(batch_size, num_heads, num_chunks, length, sizes) | {"cross_scale": cross_scale}

    def _encode(self, states: torch.Tensor, valid: torch.Tensor | None, is_prompt: bool) -> dict[str, torch.Tensor]:
        keep = None if valid is None else valid[:, None, :, :, None]
        tiles = states.unflatten(3, (-1, TILE_LENGTH))
        kept = None
        if keep is not None:
            tiles = torch.where(keep, states, 0).unflatten(3, (-1, TILE_LENGTH))
            kept = keep.expand(*states.shape[:4], 1).unflatten(3, (-1, TILE_LENGTH))
        scales = cross_scales(tiles, kept, of_tokens=self.grouping.axis == "channel")
        scales = scales.to(STORAGE_DTYPE).flatten(3, 4)
        balanced = tiles.flatten(3, 4) / expand_groups(scales.float(), _across(self.grouping), states.shape)
        codes, scale, zero = quantize(balanced, keep, self.nbits, self.grouping, spread_errors=False)
        return {"codes": pack(codes, self.nbits), "scale": scale, "zero": zero, "cross_scale": scales}


class KVarNCodec(GroupCodec):
    """Codec of both sides. No kernel reads scales across groups."""

    has_kernels = False


class KVarNCache(CodedTokensCache):
    """
    A cache that stores keys by channel and values by token in tiles of 128 tokens, rotated by a Hadamard matrix and
    with normalized variances.

    Implements [KVarN](https://huggingface.co/papers/2606.03458), a baseline. See `Cache` for details on common methods
    that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own; without it, every layer is coded.
        key_nbits, value_nbits (`int`, *optional*, defaults to 4): bits of a code: 2, 3, 4 or 8.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            cannot be coded.
    """

    def __init__(
        self, config: PreTrainedConfig | torch.nn.Module | None = None, *, key_nbits: int = 4, value_nbits: int = 4
    ):
        check_choice("key_nbits", key_nbits, SUPPORTED_NBITS)
        check_choice("value_nbits", value_nbits, SUPPORTED_NBITS)
        policy = GroupPolicy(
            partial(_make_codec, key_nbits, value_nbits),
            residual_length=TILE_LENGTH,
            least_tokens=TILE_LENGTH,
            has_whole_groups=True,
        )
        super().__init__(partial(GroupLayer, policy), config)


def _make_codec(key_nbits: int, value_nbits: int, key_dim: int, value_dim: int) -> KVarNCodec:
    by_channel = Grouping("channel", TILE_LENGTH)
    by_token = Grouping("token", value_dim)
    return KVarNCodec(
        keys=KVarNSideCodec(side="key", head_dim=key_dim, nbits=key_nbits, grouping=by_channel, is_rotated=True),
        values=KVarNSideCodec(side="value", head_dim=value_dim, nbits=value_nbits, grouping=by_token, is_rotated=True),
    )


def _across(grouping: Grouping) -> Grouping:
    """Return the other axis: all channels of a token, or a channel of all tokens of a tile."""
    return Grouping("token" if grouping.axis == "channel" else "channel", None)
