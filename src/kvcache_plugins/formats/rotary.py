"""The rotary position embedding of keys: channels that it rotates, and its angles.

Before the embedding, a channel of a key has a mean and a variance that stay the same over the whole text, so that one
width and one scale serve all tokens; the embedding mixes two channels of different energy by angles that change from
token to token. The angles here are those of an *assumed* position, a token's index without its padding. Encoding
undoes them, and decoding applies the same angles again: if the model computed with others, results are still correct,
but need more bits.

Legend: D head dim.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """
    Pairs of channels that are rotated together, and their frequencies.

    Attributes:
        frequencies (`tuple[float, ...]`): radians a token of every pair.
        name (`str`): `"half-split"`, `"interleaved"` or `"none"`.
        first (`int`): the first channel that is rotated.
        head_dim (`int`): D.
    """

    frequencies: tuple[float, ...]
    name: str
    first: int
    head_dim: int

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Compute cosines and signed sines of the angles of every channel.

        Args:
            positions (`torch.Tensor` of any shape, int64): assumed positions.

        Returns:
            Two `torch.Tensor` of shape `[*positions.shape, D]`, float32.
        """
        if not self.frequencies:
            ones = torch.ones((*positions.shape, self.head_dim), dtype=torch.float32, device=positions.device)
            return ones, torch.zeros_like(ones)
        rates = channels_of(self, positions.device)[1]
        is_halves = self.name == "half-split" and 2 * len(self.frequencies) == self.head_dim
        # Channels of a pair turn as fast, the first of them the other way
        angles = positions.double()[..., None] * (rates[self.head_dim // 2 :] if is_halves else rates)
        cosines, sines = angles.cos().float(), angles.sin().float()
        if is_halves:
            return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)
        return cosines, sines

    def rotate(self, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Apply the embedding of angles that `angles` returned to `states` `[..., D]`; undo it with `-sines`."""
        if not self.frequencies:
            return states
        if self.name == "half-split" and 2 * len(self.frequencies) == self.head_dim:
            partners = states.roll(self.head_dim // 2, dims=-1)
        else:
            partners = states[..., channels_of(self, states.device)[0]]
        return torch.addcmul(states * cosines, partners, sines)


# Shared by all layers and caches, as `RotaryLayout`s are few
@cache
def channels_of(layout: RotaryLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """
    List the other channel of every channel's pair, itself where it has none, `[D]`; and radians a token of every
    channel, negative for the first of a pair, `[D]`, float64.
    """
    with torch.inference_mode(False):
        count, first = len(layout.frequencies), layout.first
        pairs = torch.arange(first, first + 2 * count, dtype=torch.int64, device="cpu")
        pairs = pairs.view((count, 2) if layout.name == "interleaved" else (2, count))
        low, high = pairs.unbind(-1 if layout.name == "interleaved" else 0)
        partners = torch.arange(layout.head_dim, dtype=torch.int64, device="cpu")
        partners[low], partners[high] = high, low
        rates = torch.tensor(layout.frequencies, dtype=torch.float64, device="cpu")
        frequencies = torch.zeros(layout.head_dim, dtype=torch.float64, device="cpu")
        frequencies[low], frequencies[high] = -rates, rates
        return partners.to(device), frequencies.to(device)


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """
    The rotary embedding of a layer, as its config has it.

    Attributes:
        frequencies (`tuple[float, ...]`): radians a token of every pair of channels; empty if none are known.
        long_frequencies (`tuple[float, ...]`): those of longer texts, where they are others from the first token on.
        has_sections (`bool`): True if pairs turn by a token's time, row or column (mRoPE), which are its index in text
            but not in an image.
    """

    frequencies: tuple[float, ...] = ()
    long_frequencies: tuple[float, ...] = ()
    has_sections: bool = False

    def layouts(self, head_dim: int) -> list[RotaryLayout]:
        """List the layouts that keys may have; the last one rotates nothing."""
        layouts = candidate_layouts(self.frequencies, head_dim)
        if self.long_frequencies:
            layouts[-1:] = candidate_layouts(self.long_frequencies, head_dim)
        return layouts


NOT_ROTATED = RotaryEmbedding()


def candidate_layouts(frequencies: tuple[float, ...], head_dim: int) -> list[RotaryLayout]:
    """
    List the layouts that a model with these frequencies may have; the last one rotates nothing.

    If only some channels are rotated, these are the first ones or the last ones.
    """
    layouts = []
    rotated = 2 * len(frequencies)
    if frequencies and rotated <= head_dim:
        for first in sorted({0, head_dim - rotated}):
            layouts += [RotaryLayout(frequencies, name, first, head_dim) for name in ("half-split", "interleaved")]
    return [*layouts, RotaryLayout((), "none", 0, head_dim)]
