"""Values as rows of bytes: each token's codes with the step and minimum of its groups, in need of nothing else.

Legend: B batch, H key/value heads, E head dimension.
"""

import torch

from kvcache_plugins.gear.config import SideConfig
from kvcache_plugins.gear.decomposition import decompose
from kvcache_plugins.ops.compressed_states import CompressedStates
from kvcache_plugins.ops.compression_steps import CompressionSteps
from kvcache_plugins.ops.quantization import Grouping, packed_size
from kvcache_plugins.ops.rotation import rotate


class ValueRows:
    """
    How values become rows and rows values.

    Args:
        config (`SideConfig`): what values are compressed to: codes alone, no rank and no outliers.
        head_dim (`int`): E.
        group_size (`int`): channels that share a scale; divides E.
    """

    def __init__(self, config: SideConfig, head_dim: int, group_size: int):
        self.config, self.head_dim, self.group_size = config, head_dim, group_size
        self._grouping = Grouping("token", group_size)
        scale_bytes = head_dim // group_size * torch.float16.itemsize
        self._sizes = [packed_size(head_dim, config.nbits), scale_bytes, scale_bytes]

    def encode(
        self, values: torch.Tensor, valid: torch.Tensor | None = None, steps: CompressionSteps | None = None
    ) -> torch.Tensor:
        """
        Rows, `[B, H, tokens, bytes]` in uint8, of values `[B, H, tokens, E]`.

        Args:
            values (`torch.Tensor` of shape `[B, H, tokens, E]`): the values, any floating dtype.
            valid (`torch.Tensor` of shape `[B, tokens]`, *optional*): which are no padding.
            steps (`CompressionSteps`, *optional*): what computes, and is asked for its range by the caller.

        Raises:
            ValueError: if values do not fit float16.
        """
        chunk, valid = rotate(values).unsqueeze(2), None if valid is None else valid.unsqueeze(1)
        states = decompose(chunk, valid, self.config, self._grouping, 0, 1, steps=steps)
        parts = [part.view(torch.uint8) for part in (states.codes, states.scale, states.zero)]
        return torch.cat(parts, dim=4)[:, :, 0]

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Values `[B, H, tokens, E]`, float32, of rows `[B, H, tokens, bytes]`."""
        codes, scale, zero = rows.unsqueeze(2).split(self._sizes, dim=4)
        states = CompressedStates(
            codes=codes,
            scale=scale.contiguous().view(torch.float16),
            zero=zero.contiguous().view(torch.float16),
            low_rank_a=None,
            low_rank_b=None,
            outlier_indices=None,
            outlier_values=None,
            outlier_offsets=None,
            nbits=self.config.nbits,
            grouping=self._grouping,
            head_dim=self.head_dim,
            is_rotated=True,
        )
        return states.dequantize_tile(slice(None), slice(None))
