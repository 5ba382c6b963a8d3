"""Rows of bytes of consecutive tokens, and what they mean."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from kvcache_plugins.codecs.codec import Codec, Positions
from kvcache_plugins.codecs.parts import TILE_TOKENS
from kvcache_plugins.layers.token_rows import TokenRows


@dataclass(eq=False)
class CodedBlock(TokenRows):
    """
    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows of both sides.
        length (`int`): tokens in use.
        start (`int`): index of the first token in the sequence, padding included.
    """

    start: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and gives the room of the others back."""
        self.resize(length)

    def drop_first(self, count: int) -> None:
        """Forgets the first `count` tokens; copies may share the rows of before."""
        self.keys, self.values = (rows[:, :, count : self.length].clone() for rows in (self.keys, self.values))
        self.start += count
        self.length -= count

    def dense_tiles(
        self, sides: Collection[str], codec: Codec, padding: torch.Tensor | None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The dense states of `"keys"`, `"values"` or both `[B, H, tokens, D]`, float32, tile by tile."""
        for first in range(0, self.length, TILE_TOKENS):
            rows = slice(first, min(first + TILE_TOKENS, self.length))
            tile = {}
            if "keys" in sides:
                tile["keys"] = codec.decode_keys(self.keys[:, :, rows], Positions(self.start + first, padding))
            if "values" in sides:
                tile["values"] = codec.decode_values(self.values[:, :, rows])
            yield tile


@dataclass(frozen=True, eq=False)
class DecodableBlock:
    """A block with what its rows mean: the codec, and tokens at the start of every item that have no position."""

    block: CodedBlock
    codec: Codec | None
    padding: torch.Tensor | None

    @property
    def start(self) -> int:
        return self.block.start

    def dense_tiles(self, sides: Collection[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The dense states of `"keys"`, `"values"` or both, tile by tile."""
        assert self.codec is not None, "what is coded has a codec"
        return self.block.dense_tiles(sides, self.codec, self.padding)
