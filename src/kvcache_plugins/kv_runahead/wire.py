"""How keys and values of a layer look on their way from rank to rank.

A row is a token: its keys and values of all heads side by side. Tokens come first, so that the states up to any token
are one contiguous piece: a rank receives the prefix into the beginning of its buffer, writes its own tokens behind it,
and sends the whole buffer on without another copy.

Over a slow link rows can be quantized. A rank writes its own tokens' codes and passes on those that it received as
they are: a token is rounded once, however many ranks it goes through.

Legend: B batch, H heads of keys and values, D and E their head dimensions.
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.codecs.quantization import (
    Grouping,
    are_in_range,
    check_range,
    dequantize,
    pack,
    packed_size,
    quantize,
    unpack,
)


HOP_NBITS = (4, 8)
_MAX_GROUP = 64
_METADATA_BYTES = 2


@dataclass(frozen=True, slots=True)
class Wire:
    """
    The rows of one layer.

    Args:
        num_heads (`int`): heads of keys and values.
        key_dim, value_dim (`int`): their head dimensions.
        dtype (`torch.dtype`), device (`torch.device`): of the states.
        nbits (`int`, *optional*): bits a number on the way, 4 or 8; the states' own dtype if not given.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    nbits: int | None = None

    def make_rows(self, num_tokens: int, batch_size: int) -> torch.Tensor:
        """Uninitialized rows `[num_tokens, batch_size, num_heads, numbers or bytes]`."""
        if self.nbits is None:
            shape, dtype = (num_tokens, batch_size, self.num_heads, self.key_dim + self.value_dim), self.dtype
        else:
            num_bytes = sum(self._side_bytes(head_dim) for head_dim in (self.key_dim, self.value_dim))
            shape, dtype = (num_tokens, batch_size, self.num_heads, num_bytes), torch.uint8
        return torch.empty(shape, dtype=dtype, device=self.device)

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Writes states `[B, H, tokens, D]` and `[B, H, tokens, E]` into rows of as many tokens.

        Raises:
            ValueError: if states to be quantized do not fit float16.
        """
        if self.nbits is None:
            rows[..., : self.key_dim] = keys.permute(2, 0, 1, 3)
            rows[..., self.key_dim :] = values.permute(2, 0, 1, 3)
            return
        sides = [part for states in (keys, values) for part in self._encode(states)]
        rows.copy_(torch.cat(sides, dim=-1).permute(2, 0, 1, 3))

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[B, H, tokens, D]` and values `[B, H, tokens, E]` of rows: views of them if they are not quantized."""
        rows = rows.permute(1, 2, 0, 3)
        if self.nbits is None:
            return rows[..., : self.key_dim], rows[..., self.key_dim :]
        size = self._side_bytes(self.key_dim)
        return self._decode(rows[..., :size], self.key_dim), self._decode(rows[..., size:], self.value_dim)

    @staticmethod
    def _group_size(head_dim: int) -> int:
        return _MAX_GROUP if head_dim % _MAX_GROUP == 0 else head_dim

    def _side_bytes(self, head_dim: int) -> int:
        assert self.nbits is not None
        return packed_size(head_dim, self.nbits) + 2 * _METADATA_BYTES * (head_dim // self._group_size(head_dim))

    def _encode(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zeros, all as bytes `[B, H, tokens, ...]`."""
        assert self.nbits is not None
        grouping = Grouping("token", self._group_size(states.shape[3]))
        codes, scale, zero = (
            each[:, :, 0] for each in quantize(states.float()[:, :, None], None, self.nbits, grouping)
        )
        check_range(are_in_range(scale, zero))
        return pack(codes, self.nbits), scale.view(torch.uint8), zero.view(torch.uint8)

    def _decode(self, packed: torch.Tensor, head_dim: int) -> torch.Tensor:
        assert self.nbits is not None
        grouping = Grouping("token", self._group_size(head_dim))
        size = packed_size(head_dim, self.nbits)
        scale, zero = (
            each.contiguous().view(torch.float16)[:, :, None] for each in packed[..., size:].chunk(2, dim=-1)
        )
        codes = unpack(packed[..., :size], self.nbits, head_dim)[:, :, None]
        return dequantize(codes, scale, zero, grouping)[:, :, 0].to(self.dtype)
