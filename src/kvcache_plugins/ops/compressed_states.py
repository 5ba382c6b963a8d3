"""Keys or values in compressed form, and how a tile of them becomes dense again.

`CompressedStates` is a sum of up to three parts, as in GEAR: quantized codes, a low-rank correction `A B^T`, and
sparse corrections that make the outliers exact. It says nothing of how the parts were chosen. Every tensor has the
batch as its first dimension and the chunk as its third, so batch operations and growth are the same one line for all
of them.

Legend: B batch, H heads, M chunks, L tokens a chunk, D head dim, R rank, K outliers.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .quantization import Grouping, dequantize, unpack


CHUNK_DIM = 2


@dataclass(frozen=True, slots=True)
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
        outlier_indices (integer `torch.Tensor`, *optional*): for keys `[B, H, M, K, D]`, tokens within the chunk; for
            values `[B, 1, M, L, K]`, channels within `H * D`.
        outlier_values (`torch.Tensor`, float16, *optional*): what is missing at those places after codes and low rank.
        nbits (`int`): bits a code.
        grouping (`Grouping`): which values share a scale.
        head_dim (`int`): D.
        outliers_per_channel (`bool`): `True` for the layout of keys.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    low_rank_a: torch.Tensor | None
    low_rank_b: torch.Tensor | None
    outlier_indices: torch.Tensor | None
    outlier_values: torch.Tensor | None
    nbits: int
    grouping: Grouping
    head_dim: int
    outliers_per_channel: bool

    @property
    def num_chunks(self) -> int:
        return self.codes.shape[CHUNK_DIM]

    @property
    def chunk_length(self) -> int:
        return self.codes.shape[3]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of everything stored."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                yield field.name, value

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
        if self.outlier_indices is not None and self.outlier_values is not None:
            indices = self.outlier_indices[:, :, chunks].long()
            values = self.outlier_values[:, :, chunks].float()
            if self.outliers_per_channel:
                _add_channel_outliers(states, indices, values, tokens)
            else:
                states = _add_token_outliers(states, indices[:, :, :, tokens], values[:, :, :, tokens])
        return states.flatten(2, 3)


def _add_low_rank(states: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tokens: slice, chunk_length: int) -> None:
    """Adds `A B^T` to `states` `[B, H, M, tokens, D]`; A covers the last tokens of a chunk, all or the recent ones."""
    first = chunk_length - a.shape[3]
    start = max(tokens.start, first)
    if start < tokens.stop:
        rows = a[:, :, :, start - first : tokens.stop - first].float()
        states[:, :, :, start - tokens.start :] += rows @ b.float().transpose(-1, -2)


def _add_channel_outliers(states: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, tokens: slice) -> None:
    """Adds corrections given per channel to `states` `[B, H, M, tokens, D]`, of which they may lie outside."""
    local = indices - tokens.start
    length = states.shape[3]
    values = torch.where((local >= 0) & (local < length), values, 0)
    states.scatter_add_(3, local.clamp_(0, length - 1), values)


def _add_token_outliers(states: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns `states` `[B, H, M, tokens, D]` with corrections given per token over all heads added."""
    flat = states.permute(0, 2, 3, 1, 4).flatten(3)
    flat.scatter_add_(3, indices.squeeze(1), values.squeeze(1))
    return flat.unflatten(3, (states.shape[1], states.shape[4])).permute(0, 3, 1, 2, 4)
