"""Values as rows of bytes: each token's codes with the step and minimum of its groups, in need of nothing else.

Legend: B batch, H key/value heads, E head dimension.
"""

import torch

from kvcache_plugins.codecs.groups import SideCodec
from kvcache_plugins.codecs.quantization import STORAGE_DTYPE, packed_size


class ValueRows:
    """
    How values become rows and rows values.

    Args:
        codec (`SideCodec`): what values are compressed to: codes alone, in groups of channels.
    """

    def __init__(self, codec: SideCodec):
        self.codec = codec
        self.group_size = codec.grouping.group_size or codec.head_dim
        scale_bytes = codec.head_dim // self.group_size * STORAGE_DTYPE.itemsize
        self._sizes = [packed_size(codec.head_dim, codec.nbits), scale_bytes, scale_bytes]

    def encode(self, values: torch.Tensor, valid: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Compresses values.

        Args:
            values (`torch.Tensor` of shape `[B, H, tokens, E]`): the values, any floating dtype.
            valid (`torch.Tensor` of shape `[B, tokens]`, *optional*): which are no padding.

        Returns:
            Rows, `[B, H, tokens, bytes]` in uint8, and whether they fit float16: see `SideCodec.encode`.
        """
        states, fits = self.codec.encode(values.unsqueeze(2), None if valid is None else valid.unsqueeze(1))
        parts = [part.view(torch.uint8) for part in (states.codes, states.scale, states.zero)]
        return torch.cat(parts, dim=4)[:, :, 0], fits

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Values `[B, H, tokens, E]`, float32, of rows `[B, H, tokens, bytes]`."""
        codes, *scales = rows.unsqueeze(2).split(self._sizes, dim=4)
        scale, zero = (part.contiguous().view(STORAGE_DTYPE) for part in scales)
        states = self.codec.wrap({"codes": codes, "scale": scale, "zero": zero})
        return states.dequantize_tile(slice(None), slice(None))
