"""Keys or values in compressed form, and how a tile of them becomes dense again.

`CompressedStates` is a sum of up to three parts, as in GEAR: quantized codes, a low-rank correction `A B^T`, and
sparse corrections that make the outliers exact. It says nothing of how the parts were chosen. Every tensor has the
batch as its first dimension and the chunk as its third, so batch operations and growth are the same one line for all
of them.

Legend: B batch, H heads, M chunks, L tokens a chunk, D head dim, R rank.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .outliers import add_outliers
from .quantization import Grouping, dequantize, unpack
from .rotation import rotate


CHUNK_DIM = 2
# Dense float32 values of one tile stay within the processor's caches
_TILE_TOKENS = 1024
TENSOR_NAMES = (
    "codes",
    "scale",
    "zero",
    "low_rank_a",
    "low_rank_b",
    "outlier_indices",
    "outlier_values",
    "outlier_offsets",
)


# Equal if the same object: kernels keep what they have prepared for one in dictionaries
@dataclass(frozen=True, eq=False)
class CompressedStates:
    """
    Chunks of keys or values, compressed.

    Attributes:
        codes (`torch.Tensor` of shape `[B, H, M, L, packed bytes]`, uint8): packed codes.
        scale, zero (`torch.Tensor` of shape `[B, H, M, groups, D]` or `[B, H or 1, M, L, groups]`, float16): a group's
            step and minimum.
        low_rank_a (`torch.Tensor` of shape `[B, H, M, last tokens, R]`, float16, *optional*): covers the last tokens
            of the chunk.
        low_rank_b (`torch.Tensor` of shape `[B, H, M, D, R]`, float16, *optional*): the other factor.
        outlier_indices, outlier_values, outlier_offsets (`torch.Tensor`, *optional*): what is missing at some places
            after codes and low rank, as `ops.outliers.sort_into_tiles` returns it; values in float16.
        nbits (`int`): bits a code.
        grouping (`Grouping`): which values share a scale.
        head_dim (`int`): D.
        is_rotated (`bool`, *optional*, defaults to `False`): whether these are the states as `ops.rotation.rotate`
            turns them, which a reader has to undo.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    low_rank_a: torch.Tensor | None
    low_rank_b: torch.Tensor | None
    outlier_indices: torch.Tensor | None
    outlier_values: torch.Tensor | None
    outlier_offsets: torch.Tensor | None
    nbits: int
    grouping: Grouping
    head_dim: int
    is_rotated: bool = False

    @property
    def num_chunks(self) -> int:
        return self.codes.shape[CHUNK_DIM]

    @property
    def chunk_length(self) -> int:
        return self.codes.shape[3]

    @property
    def has_outliers(self) -> bool:
        return self.outlier_indices is not None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of everything stored."""
        for name in TENSOR_NAMES:
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "CompressedStates":
        """The same states with `function` applied to every tensor."""
        return self.replace({name: function(tensor) for name, tensor in self.named_tensors()})

    def replace(self, tensors: dict[str, torch.Tensor]) -> "CompressedStates":
        """The same states with other tensors under some names."""
        changes: dict[str, Any] = dict(tensors)
        return dataclasses.replace(self, **changes)

    def dequantize_tile(self, chunks: slice, tokens: slice) -> torch.Tensor:
        """
        The dense states of some tokens of some chunks.

        Args:
            chunks (`slice`): which chunks.
            tokens (`slice`): which tokens within each of them, beginning and ending where groups do.

        Returns:
            `torch.Tensor` of shape `[B, H, chunks * tokens, D]`, float32.
        """
        codes = unpack(self.codes[:, :, chunks, tokens], self.nbits, self.head_dim)
        groups = tokens
        if self.grouping.axis == "channel":
            size = self.grouping.group_size
            groups = slice(None) if size is None else slice(tokens.start // size, tokens.stop // size)
        states = dequantize(codes, self.scale[:, :, chunks, groups], self.zero[:, :, chunks, groups], self.grouping)
        if self.low_rank_a is not None and self.low_rank_b is not None:
            _add_low_rank(
                states, self.low_rank_a[:, :, chunks], self.low_rank_b[:, :, chunks], tokens, self.chunk_length
            )
        if self.has_outliers:
            assert self.outlier_indices is not None
            assert self.outlier_values is not None
            assert self.outlier_offsets is not None
            add_outliers(
                states,
                self.outlier_indices[:, :, chunks],
                self.outlier_values[:, :, chunks],
                self.outlier_offsets[:, :, chunks],
                tokens,
            )
        return (rotate(states) if self.is_rotated else states).flatten(2, 3)


def tile_slices(keys: CompressedStates, num_chunks: int) -> Iterator[tuple[slice, slice]]:
    """
    Chunks and tokens of one tile after another over `num_chunks` chunks: several short chunks, or whole groups of a
    long one.
    """
    length = keys.chunk_length
    if length <= _TILE_TOKENS:
        step = max(_TILE_TOKENS // length, 1)
        for first in range(0, num_chunks, step):
            yield slice(first, min(first + step, num_chunks)), slice(0, length)
        return
    group = keys.grouping.group_size if keys.grouping.axis == "channel" and keys.grouping.group_size else 1
    step = max(_TILE_TOKENS // group, 1) * group
    for chunk in range(num_chunks):
        for first in range(0, length, step):
            yield slice(chunk, chunk + 1), slice(first, min(first + step, length))


def _add_low_rank(states: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tokens: slice, chunk_length: int) -> None:
    """Adds `A B^T` to `states` `[B, H, M, tokens, D]`; A covers the last tokens of a chunk, all or the recent ones."""
    first = chunk_length - a.shape[3]
    start = max(tokens.start, first)
    if start < tokens.stop:
        rows = a[:, :, :, start - first : tokens.stop - first].float()
        states[:, :, :, start - tokens.start :] += rows @ b.float().transpose(-1, -2)
