"""Tokens in codes of which some are chosen: what is stored of them, as it is handed to what computes.

Each is one object as long as nothing is added or dropped, so that what was told from it once can be kept beside it.

Legend: B batch, H key/value heads, D and E head dims of keys and values, T tokens of a group, S sink tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class KeyGroups:
    """
    Keys in groups of tokens: a number is `zero + scale * code`, both of its channel in its group.

    The place of a token counts over all groups one behind the other, its slot over all tokens in order.

    Attributes:
        codes (`torch.Tensor` of shape `[B, H, groups, T, bytes]`, uint8): see `codecs.quantization.pack`.
        scale, zero (`torch.Tensor` of shape `[B, H, groups, D]`, float16): a channel's step and minimum.
        nbits (`int`): bits a code, 2, 4 or 8.
        runs (`Sequence[tuple[int, int, int]]`): of all tokens in order, those whose place is as far behind their slot:
            the first slot, the slot behind the last, and how far. No group has tokens of two of them.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    nbits: int
    runs: Sequence[tuple[int, int, int]]

    @property
    def group_size(self) -> int:
        """Tokens of a group, T."""
        return self.codes.shape[3]

    def places_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Places of the tokens in slots, of the slots' shape."""
        places = slots + self.runs[0][2]
        for first, _, shift in self.runs[1:]:
            places = torch.where(slots >= first, slots + shift, places)
        return places


@dataclass(frozen=True, eq=False)
class ValuePages:
    """
    Rotated values in rows of bytes: a row has codes, then the steps and then the minima of its groups in float16.

    Attributes:
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, bytes]`, uint8): slot `i` is row `i`
            of all pages one behind the other.
        head_dim (`int`): E.
        nbits (`int`): bits a code.
        group_size (`int`): channels that share a step.
    """

    pages: Sequence[torch.Tensor]
    head_dim: int
    nbits: int
    group_size: int


@dataclass(frozen=True, eq=False)
class SinkStates:
    """
    Tokens that are exact though they are in slots.

    Attributes:
        first (`torch.Tensor` of shape `[B]`, int64, *optional*): slot of every sequence's first, the others follow;
            `None` if that is slot 0 of all.
        keys, values (`torch.Tensor` of shape `[B, H, S, D]`, `[B, H, S, E]`): their states.
    """

    first: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor

    def is_same(self, other: "SinkStates") -> bool:
        """Tells whether the same tensors are in both."""
        return self.first is other.first and self.keys is other.keys and self.values is other.values


@dataclass(frozen=True, eq=False)
class CodedTokens:
    """Keys and values of the tokens in all slots, and the states of those that are exact."""

    keys: KeyGroups
    values: ValuePages
    sinks: SinkStates
