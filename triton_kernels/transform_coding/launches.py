"""Rows of bytes, constants that kernels read beside them, and the state that tokens are pushed into.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from ..stored_format import RowLayout


Pair = tuple[torch.Tensor, torch.Tensor]
Format = TypeVar("Format", bound=RowLayout, covariant=True)


class CodedRows(NamedTuple):
    """
    One side of a cache as rows of bytes.

    Args:
        rows (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8): `[scale | block | block | ...]`; a head's rows
            follow each other without gaps.
        layout (`RowLayout`): their format.
        coefficients (`torch.Tensor` of shape `[9, 4]`, float32): `factor, first, second, third` of every width: the
            level of a code is `c (first + c^2 (second + c^2 third))` with `c = (2 code + 1) factor - 1`.
    """

    rows: torch.Tensor
    layout: RowLayout
    coefficients: torch.Tensor


class RotaryAngles(NamedTuple):
    """
    The angles of keys' rotary embedding. An angle of a position is the sum of two: its remainder's and the rest's.

    Attention in calibrated bases takes them by pairs of channels, D / 2 of them (rounded up) instead of D: the angles
    of the pairs' first channels.

    Args:
        partners (`torch.Tensor` of shape `[D]`, int32): the other channel of every channel's pair, itself if it has
            none; or by pairs, `[2, D / 2]`, their first and second channels. Channels that are not rotated are paired
            with each other; a single one has the second channel D.
        near (`torch.Tensor` of shape `[P, 2, D]`, float32): cosines and signed sines of the positions 0 to P - 1.
        far (`torch.Tensor` of shape `[at least positions / P, 2, D]`, float32): those of the multiples of P.
    """

    partners: torch.Tensor
    near: torch.Tensor
    far: torch.Tensor


class Codebook(NamedTuple):
    """
    Codes of numbers, by the width of their block, see `coding_tiles`.

    Args:
        coefficients (`torch.Tensor` of shape `[9, 4]`, float32): coefficients of their levels, see `CodedRows`.
        cell_codes (`torch.Tensor` of shape `[9, cells]`, uint8): number of bounds below all of a cell.
        cell_bounds (`torch.Tensor` of shape `[9, cells]`, float32): the bound in a cell, infinite if there is none.
    """

    coefficients: torch.Tensor
    cell_codes: torch.Tensor
    cell_bounds: torch.Tensor


@dataclass(frozen=True, eq=False)
class PushState(Generic[Format]):
    """
    Tensors and limits of a layer that new tokens are pushed into. Tensors of keys and of values are contiguous.

    Attributes:
        tail (two `torch.Tensor` of shape `[B, H, limit, D or E]`): newest tokens, exact, oldest first.
        older (two `torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows of older tokens, with capacity for those
            that a push may append.
        recent (two `torch.Tensor` of shape `[B, H, recent capacity, R]`, uint8, *optional*): rows of more bits between
            the older ones and the tail, with capacity for `most_recent` and those that a push encodes. Without them
            tokens are encoded behind the older rows.
        counters (`torch.Tensor` of shape `[2, B, H, 4]`, int64): older rows, recent rows and tail tokens in use, and
            tokens of the sequence. Every program has its own set, all with the same numbers.
        recent_offset (`torch.Tensor` of shape `[B]`, int64, *optional*): written by every push such that recent row
            `i` has the position `start + i - recent_offset`.
        formats (two `RowLayout`): formats of older rows.
        finer_formats (two `RowLayout`, *optional*): formats of recent rows, which differ in widths and row size alone.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every sequence that have no
            position.
        num_kept (`int`): newest tokens of a full tail that stay exact, fewer than `limit`.
        most_recent (`int`): recent rows beyond which the oldest are requantized.
        num_after (`int`): recent rows that are left then.
        num_positions (`int`): bound on the positions of all tokens that are pushed.
        start (`int`): constant in `recent_offset`, at least every position.
    """

    tail: Pair
    older: Pair
    recent: Pair | None
    counters: torch.Tensor
    recent_offset: torch.Tensor | None
    formats: tuple[Format, Format]
    finer_formats: tuple[Format, Format] | None
    padding: torch.Tensor | None
    num_kept: int
    most_recent: int
    num_after: int
    num_positions: int
    start: int
