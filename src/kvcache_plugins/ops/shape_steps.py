"""The steps of a GEAR decomposition of tensors without data: the shapes of what would be stored, and nothing computed.

On the device `meta` every operation is answered with a shape, but hundreds of them take long, and some ask for
numbers. Here a step is a few empty tensors, so that a cache of any length is sized at once.

Legend: B batch, H heads, M chunks, L tokens a chunk, D head dim, K outliers a channel or token, R rank.
"""

import torch

from .compression_steps import STORAGE_DTYPE, CompressionSteps
from .outlier_selection import Outliers, num_outliers_per_side
from .outliers import index_dtype, num_offsets
from .quantization import Grouping, packed_size


class ShapeSteps(CompressionSteps):
    """Every step on tensors without data; but which tokens are real, `valid`, comes with its data."""

    def prepare(self, states: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        return states

    def select_outliers(
        self, states: torch.Tensor, valid: torch.Tensor | None, sparsity: float, by_channel: bool
    ) -> Outliers | None:
        batch_size, num_heads, num_chunks, length, head_dim = states.shape
        length_of_row = _num_real(length, valid) if by_channel else num_heads * head_dim
        count = 2 * num_outliers_per_side(length_of_row, sparsity)
        if count == 0:
            return None
        shape = (
            (batch_size, num_heads, num_chunks, count, head_dim)
            if by_channel
            else (batch_size, num_chunks, length, count)
        )
        return Outliers(states.new_empty(shape, dtype=torch.int64), None, states)

    def quantize(
        self,
        states: torch.Tensor,
        keep: torch.Tensor | None,
        nbits: int,
        grouping: Grouping,
        *,
        wants_missing: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        *dims, length, head_dim = states.shape
        if grouping.axis == "channel":
            shape = (*dims, length // (grouping.group_size or length), head_dim)
        elif grouping.group_size is None:
            shape = (dims[0], 1, dims[2], length, 1)
        else:
            shape = (*dims, length, head_dim // grouping.group_size)
        codes = states.new_empty((*dims, length, packed_size(head_dim, nbits)), dtype=torch.uint8)
        scale, zero = (states.new_empty(shape, dtype=STORAGE_DTYPE) for _ in range(2))
        return codes, scale, zero, states if wants_missing else None

    def approximate(
        self,
        missing: torch.Tensor,
        keep: torch.Tensor | None,
        valid: torch.Tensor | None,
        rank: int,
        num_iterations: int,
        recent_ratio: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        *dims, length, head_dim = missing.shape
        num_rows = length if recent_ratio == 1 else max(round(_num_real(length, valid) * recent_ratio), 1)
        rows = (num_rows, head_dim)
        a, b = (missing.new_empty((*dims, size, rank), dtype=STORAGE_DTYPE) for size in rows)
        return a, b

    def store_outliers(
        self, missing: torch.Tensor, low_rank: tuple[torch.Tensor, torch.Tensor] | None, outliers: Outliers
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch_size, num_heads, num_chunks, length, head_dim = missing.shape
        shape = (batch_size, 1, num_chunks)
        count = outliers.indices.numel() // (batch_size * num_chunks)
        return (
            missing.new_empty((*shape, count), dtype=index_dtype(head_dim)),
            missing.new_empty((*shape, count), dtype=STORAGE_DTYPE),
            missing.new_empty((*shape, num_offsets(length, num_heads)), dtype=torch.int32),
        )


def _num_real(length: int, valid: torch.Tensor | None) -> int:
    """The most real tokens of a chunk of `length`."""
    return length if valid is None else int(valid.sum(dim=2).max())
