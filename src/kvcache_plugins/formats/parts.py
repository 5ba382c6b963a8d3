"""Parts: a layer's tokens in the forms that attention takes, in the order of the tokens, and tokens to select from.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, T tokens of a part, D and E head
dims of keys and values, R bytes of a row, S sink tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .groups import QuantizedChunks
from .positions import START, Positions
from .rows import RowFormats


SIDES = "keys", "values"


@dataclass(frozen=True, eq=False, slots=True)
class DensePart:
    """
    Exact states.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, at least T, D or E]`): the states, with capacity for more.
        length (`int`): tokens in use, T.
        mask (`torch.Tensor` of shape broadcastable to `[B, H * G, Q, T]`, *optional*): boolean (`True` attends) or
            added to the scores. Tokens without a column are attended to, but a mask has several columns.
        num_tokens (`torch.Tensor` of shape `[1]`, integer, *optional*): tokens in use where the host does not know
            them, at most `length`: for Triton's kernels alone.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.keys.shape[3], self.values.shape[3]

    def in_use(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


@dataclass(frozen=True, eq=False, slots=True)
class GroupPart:
    """
    States in groups, whose chunks may have capacity for more tokens; `length`, `mask` and `num_tokens` as in
    `DensePart`.
    """

    keys: QuantizedChunks
    values: QuantizedChunks
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.keys.head_dim, self.values.head_dim


@dataclass(frozen=True, eq=False)
class RowPart:
    """
    Tokens that are rows of formats that kernels know.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8): rows; there may be capacity for more.
        formats (two `RowFormat`): formats of keys and of values.
        positions (`Positions`): positions of the tokens.
        length, mask, num_tokens: as in `DensePart`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    formats: RowFormats
    positions: Positions
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        keys, values = self.formats
        return keys.head_dim, values.head_dim


@dataclass(frozen=True, eq=False)
class OpaqueRowPart:
    """
    Tokens that are rows which only their codec reads, tile by tile in PyTorch.

    Attributes:
        keys, values, positions, length, mask: as in `RowPart`.
        decode_keys, decode_values (`Callable`): decode rows, of keys at their positions, to states `[B, H, T, D]`,
            float32.
    """

    keys: torch.Tensor
    values: torch.Tensor
    decode_keys: Callable[[torch.Tensor, Positions], torch.Tensor]
    decode_values: Callable[[torch.Tensor], torch.Tensor]
    positions: Positions
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class PagedRowPart:
    """
    Rows of several sequences in pages of one memory, which the sequences may share: a page has rows of keys and of
    values, `[H, tokens of a page, R]` each.

    Attributes:
        keys, values (`torch.Tensor` of shape `[pages, H, tokens of a page, R]`, uint8): rows of all pages,
            views of `memory`.
        memory (`torch.Tensor` of shape `[bytes]`, uint8): storage of all pages.
        pages (`torch.Tensor` of shape `[B, most]`, int64): numbers of every sequence's pages.
        lengths (`torch.Tensor` of shape `[B]`, int64): tokens of every sequence; its first is at position 0.
        length (`int`): the largest of the lengths, T.
        num_hidden (`int`): tokens at every sequence's beginning that are not attended to.
        formats (two `RowFormat`): formats of keys and of values; those without bases are of B sequences.
    """

    keys: torch.Tensor
    values: torch.Tensor
    memory: torch.Tensor
    pages: torch.Tensor
    lengths: torch.Tensor
    length: int
    num_hidden: int
    formats: RowFormats

    @property
    def head_dims(self) -> tuple[int, int]:
        keys, values = self.formats
        return keys.head_dim, values.head_dim

    def gathered(self) -> RowPart:
        """Copy the rows of every sequence out of the pages, with a mask of the tokens that are attended to."""
        keys, values = (side[self.pages].transpose(1, 2).flatten(2, 3) for side in (self.keys, self.values))
        columns = torch.arange(self.length, dtype=torch.int64, device=self.lengths.device)
        mask = ((columns >= self.num_hidden) & (columns < self.lengths[:, None]))[:, None, None]
        return RowPart(keys, values, self.formats, START, self.length, mask)


Part = DensePart | GroupPart | RowPart | PagedRowPart
# Parts that a layer holds
LayerPart = DensePart | GroupPart | RowPart | OpaqueRowPart


@dataclass(frozen=True, eq=False)
class SinkStates:
    """
    Exact states `[B, H, S, D or E]` of tokens that have slots, and the slot `[B]`, int64, of every sequence's `first`,
    which the others follow; `None` if that is slot 0 of all.
    """

    first: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class SelectableRows:
    """
    Tokens in slots: keys and values as rows, and the states of exact tokens.

    Attributes:
        keys (`torch.Tensor` of shape `[B, H, at least N, R]`, uint8): key rows, slot `i` is row `i`.
        length (`int`): slots in use, N.
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, R]`, uint8): value rows: slot `i` is
            row `i` of all pages one behind the other.
        formats (two `RowFormat`): formats of keys and of values.
        positions, sinks: positions of the slots' tokens, and the exact ones among them.
    """

    keys: torch.Tensor
    length: int
    pages: Sequence[torch.Tensor]
    formats: RowFormats
    positions: Positions
    sinks: SinkStates
