"""Parts: a layer's tokens in the forms that attention takes, one behind the other, and tokens to choose from.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, T tokens of a part, D and E head
dims of keys and values, R bytes of a row, S sink tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from .codec import START, Codec, Positions
from .groups import CompressedStates
from .rows import RowCodec


# Dense float32 values of one tile stay within the processor's caches
TILE_TOKENS = 1024
# Keys and values `[B, H, tokens, D or E]`, and the tokens of a part that they are of, from the one up to the other: of
# parts that are not exact dense in float32. A side that is not asked for may be another tensor of as many tokens
Tile = tuple[torch.Tensor, torch.Tensor, int, int]
SIDES = "keys", "values"


@dataclass(frozen=True, eq=False, slots=True)
class DensePart:
    """
    Exact states.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, at least T, D or E]`): the states, with capacity for more.
        length (`int`): tokens in use, T.
        mask (`torch.Tensor` of shape broadcastable to `[B, H * G, Q, T]`, *optional*): boolean (`True` attends) or
            added to the scores. It may have fewer columns, but several: what they do not cover is attended to.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    mask: torch.Tensor | None

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.keys.shape[3], self.values.shape[3]

    def in_use(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def tiles(self, sides: Collection[str] = SIDES) -> Iterator[Tile]:
        yield *self.in_use(), 0, self.length


@dataclass(frozen=True, eq=False, slots=True)
class CompressedPart:
    """States in groups, whose chunks may have capacity for more tokens; `length` and `mask` as in `DensePart`."""

    keys: CompressedStates
    values: CompressedStates
    length: int
    mask: torch.Tensor | None

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.keys.head_dim, self.values.head_dim

    def tiles(self, sides: Collection[str] = SIDES) -> Iterator[Tile]:
        stored = [each for name, each in zip(SIDES, (self.keys, self.values), strict=True) if name in sides]
        size, num_chunks = self.keys.chunk_length, -(-self.length // self.keys.chunk_length)
        group = self.keys.group_size if self.keys.axis == "channel" and self.keys.group_size else 1
        # Several short chunks, or whole groups of a long one
        step, stride = max(TILE_TOKENS // size, 1), min(max(TILE_TOKENS // group, 1) * group, size)
        for chunk in range(0, num_chunks, step):
            chunks = slice(chunk, min(chunk + step, num_chunks))
            for first in range(0, size, stride):
                start, tokens = chunk * size + first, slice(first, min(first + stride, size))
                # Chunks may not be in use to their end
                stop = min(start + (chunks.stop - chunk) * (tokens.stop - first), self.length)
                if start < stop:
                    made = [side.dequantize_tile(chunks, tokens)[:, :, : stop - start] for side in stored]
                    yield made[0], made[-1], start, stop


@dataclass(frozen=True, eq=False)
class CodedPart:
    """
    Tokens that are rows.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8): rows; there may be capacity for more.
        codec, positions, length, mask: what they mean, where the tokens stand, and as in `DensePart`.
        num_tokens (`torch.Tensor` of shape `[1]`, integer, *optional*): tokens in use where the host does not know
            them, at most `length`: for Triton's kernels alone.
    """

    keys: torch.Tensor
    values: torch.Tensor
    codec: Codec
    positions: Positions
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        assert isinstance(self.codec, RowCodec), "only rows of tables have kernels"
        keys, values = self.codec.tables()
        return keys.head_dim, values.head_dim

    def tiles(self, sides: Collection[str] = SIDES) -> Iterator[Tile]:
        for first in range(0, self.length, TILE_TOKENS):
            last = min(first + TILE_TOKENS, self.length)
            keys, values = self.keys[:, :, first:last], self.values[:, :, first:last]
            if "keys" in sides:
                keys = self.codec.decode_keys(keys, self.positions.after(first))
            if "values" in sides:
                values = self.codec.decode_values(values)
            yield keys, values, first, last


@dataclass(frozen=True, eq=False)
class PagedPart:
    """
    Rows of several sequences in pages of one memory, which they may share: a page has rows of keys and of values,
    `[H, tokens of a page, R]` each.

    Attributes:
        keys, values (`torch.Tensor` of shape `[pages, H, tokens of a page, R]`, uint8): rows of all pages, where they
            stand in `memory`.
        memory (`torch.Tensor` of shape `[bytes]`, uint8): what holds all pages.
        pages (`torch.Tensor` of shape `[B, most]`, int64): numbers of every sequence's pages.
        lengths (`torch.Tensor` of shape `[B]`, int64): tokens of every sequence; its first is at position 0.
        length (`int`): the most of them, T.
        num_hidden (`int`): tokens at every sequence's beginning that are not attended to.
        codec (`RowCodec`): what rows mean; tables without bases are those of B sequences.
    """

    keys: torch.Tensor
    values: torch.Tensor
    memory: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor
    length: int
    num_hidden: int
    codec: RowCodec

    @property
    def head_dims(self) -> tuple[int, int]:
        keys, values = self.codec.tables()
        return keys.head_dim, values.head_dim

    def gathered(self) -> CodedPart:
        """Returns the rows of every sequence one behind the other, copied, and a mask of what is attended to."""
        keys, values = (side[self.pages].transpose(1, 2).flatten(2, 3) for side in (self.keys, self.values))
        columns = torch.arange(self.length, dtype=torch.int64, device=self.lengths.device)
        mask = ((columns >= self.num_hidden) & (columns < self.lengths[:, None]))[:, None, None]
        return CodedPart(keys, values, self.codec, START, self.length, mask)


Part = DensePart | CompressedPart | CodedPart | PagedPart


@dataclass(frozen=True, eq=False)
class SinkStates:
    """
    Tokens that are exact though they are in slots, `[B, H, S, D or E]`, and the slot `[B]`, int64, of every sequence's
    `first`, which the others follow; `None` if that is slot 0 of all.
    """

    first: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class RowTokens:
    """
    Keys and values of tokens in slots as rows of tables, and states of those that are exact: one object as long as
    none is added or dropped, so that what was told from it once can be kept beside it.

    Attributes:
        keys (`torch.Tensor` of shape `[B, H, at least N, R]`, uint8): key rows, slot `i` is row `i`.
        length (`int`): slots in use, N.
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, R]`, uint8): value rows: slot `i` is
            row `i` of all pages one behind the other.
        codec, positions, sinks: what rows mean, where the slots' tokens stand, and those of them that are exact.
    """

    keys: torch.Tensor
    length: int
    pages: Sequence[torch.Tensor]
    codec: RowCodec
    positions: Positions
    sinks: SinkStates
