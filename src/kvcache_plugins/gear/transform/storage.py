"""Rows of bytes of consecutive tokens, with room to grow."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from kvcache_plugins.ops.transform_coding.basis_coder import BasisCoder
from kvcache_plugins.ops.transform_coding.parts import TILE_TOKENS, RowCoder


# Share of the rows held that capacity grows by
_GROWTH = 64


@dataclass(eq=False)
class CodedBlock:
    """
    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows of both sides.
        start (`int`): index of the first token in the sequence, padding included.
        length (`int`): tokens in use.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def append(self, keys: torch.Tensor, values: torch.Tensor, most: int | None = None) -> None:
        """
        Adds rows of tokens that follow; capacity grows little, as spare room is held too and moving is cheap, and not
        beyond `most` tokens before it is needed.
        """
        total = self.length + keys.shape[2]
        if total > self.keys.shape[2]:
            capacity = self.length + self.length // _GROWTH
            capacity = max(total, capacity if most is None else min(capacity, most))
            self.keys, self.values = (_resized(rows, self.length, capacity) for rows in (self.keys, self.values))
        self.keys[:, :, self.length : total] = keys
        self.values[:, :, self.length : total] = values
        self.length = total

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and gives the room of the others back."""
        self.keys, self.values = (_resized(rows, length, length) for rows in (self.keys, self.values))
        self.length = length

    def drop_first(self, count: int) -> None:
        """Forgets the first `count` tokens; copies may share the rows of before."""
        self.keys, self.values = (rows[:, :, count : self.length].clone() for rows in (self.keys, self.values))
        self.start += count
        self.length -= count

    def dense_tiles(
        self, sides: Collection[str], coder: RowCoder | BasisCoder, padding: torch.Tensor | None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The dense states of `"keys"`, `"values"` or both `[B, H, tokens, D]`, float32, tile by tile."""
        for first in range(0, self.length, TILE_TOKENS):
            rows = slice(first, min(first + TILE_TOKENS, self.length))
            tile = {}
            if "keys" in sides:
                tile["keys"] = coder.decode_keys(self.keys[:, :, rows], self.start + first, padding)
            if "values" in sides:
                tile["values"] = coder.decode_values(self.values[:, :, rows])
            yield tile

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)


@dataclass(frozen=True, eq=False)
class DecodableBlock:
    """A block with what its rows mean: the coder, and tokens at the start of every item that have no position."""

    block: CodedBlock
    coder: RowCoder | BasisCoder | None
    padding: torch.Tensor | None

    @property
    def start(self) -> int:
        return self.block.start

    def dense_tiles(self, sides: Collection[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The dense states of `"keys"`, `"values"` or both, tile by tile."""
        assert self.coder is not None, "what is coded has a coder"
        return self.block.dense_tiles(sides, self.coder, self.padding)


def _resized(rows: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    resized = rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3])
    resized[:, :, :used] = rows[:, :, :used]
    return resized
