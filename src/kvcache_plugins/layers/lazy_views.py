"""What a model does to stored states before it multiplies with them: recorded, and done a tile of tokens at a time.

A view is a function of the stored keys and values that treats every token by itself: transposed, repeated, split,
projected. Of a tile of the states it makes a tile of what the model sees, so that nothing has to be whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch


Tile = Mapping[str, torch.Tensor]


class View(ABC):
    """
    A function of stored states, token by token.

    Attributes:
        sides (`frozenset[str]`): what of `"keys"` and `"values"` it is of.
        only_moves (`bool`): whether it moves and repeats numbers, and changes none.
    """

    sides: frozenset[str]
    only_moves: bool = False

    def of(self, tile: Tile, done: dict["View", torch.Tensor] | None = None) -> torch.Tensor:
        """
        What it makes of some tokens.

        Args:
            tile (`Mapping[str, torch.Tensor]`): the stored states of its sides, `[B, H, tokens, D]` each.
            done (`dict`, *optional*): what views have made of the same tile; this one's is added.
        """
        done = {} if done is None else done
        if self not in done:
            done[self] = self._make(tile, done)
        return done[self]

    @abstractmethod
    def _make(self, tile: Tile, done: dict["View", torch.Tensor]) -> torch.Tensor:
        """The same, made anew."""


class StoredSide(View):
    """Keys or values as they are stored."""

    only_moves = True

    def __init__(self, side: str):
        self.side, self.sides = side, frozenset({side})

    def _make(self, tile: Tile, done: dict[View, torch.Tensor]) -> torch.Tensor:
        return tile[self.side]


class Step(View):
    """A function of other views, all of one layer."""

    def __init__(self, function: Callable[..., torch.Tensor], *sources: View, only_moves: bool = False):
        self.function, self.sources = function, sources
        self.only_moves = only_moves and all(source.only_moves for source in sources)
        self.sides = frozenset().union(*(source.sides for source in sources))

    def _make(self, tile: Tile, done: dict[View, torch.Tensor]) -> torch.Tensor:
        return self.function(*(source.of(tile, done) for source in self.sources))


class Blank(View):
    """An empty tensor that views are copied into."""

    def __init__(self, shape: tuple[int, ...], token_dim: int, dtype: torch.dtype, device: torch.device):
        self.shape, self.token_dim, self.dtype, self.device = shape, token_dim, dtype, device
        self.sides = frozenset()
        self._copies: list[tuple[Any, View]] = []

    def copy_into(self, index: Any, view: View) -> None:
        """Notes that what `view` makes is copied into the places of `index`."""
        self._copies.append((index, view))
        self.sides |= view.sides

    def _make(self, tile: Tile, done: dict[View, torch.Tensor]) -> torch.Tensor:
        shape = list(self.shape)
        shape[self.token_dim] = next(iter(tile.values())).shape[2]
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        for index, view in self._copies:
            made[index] = view.of(tile, done)
        return made


class BlankPart(Step):
    """Places of an empty tensor, to copy into."""

    def __init__(self, blank: Blank, index: Any):
        super().__init__(lambda made: made[index], blank)
        self.blank, self.index = blank, index

    def copy_(self, view: View) -> None:
        """Notes that what `view` makes is copied here."""
        self.blank.copy_into(self.index, view)
        self.sides = self.blank.sides
