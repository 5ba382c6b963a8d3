"""When a layer packs its exact tokens, and by which codec: token by token as rows, or in groups that span tokens.

A `CompressedLayer` knows no format, and a codec no layer. What differs between codecs of rows and of groups is asked
of a `Packing`: how many tokens of a run are packed and which of the first stay exact, what they are stored as, and
which kernels attend to it.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, T tokens, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kvcache_plugins.codecs.codec import Codec, Positions
from kvcache_plugins.codecs.groups import GroupCodec
from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.kernels.engine import MAX_NUM_COMPILED_QUERIES, choose_kernel

from .packed_tokens import Block, ExactPrefix, GroupBlock, RowBlock


class Split(NamedTuple):
    """
    How a first prompt is stored.

    Args:
        num_exact (`torch.Tensor` of shape `[B]`, on the CPU): first tokens of every sequence that stay exact.
        first (`int`): position of the first token that is packed; that of the end if none is.
        pending (`torch.Tensor` of shape `[B]`, bool): sequences that are too short for a table, and stay exact whole.
    """

    num_exact: torch.Tensor
    first: int
    pending: torch.Tensor


class Packing(ABC):
    """
    How a layer packs.

    Attributes:
        residual_length (`int`): decoded tokens that wait in exact form; 0 where tokens are packed as they come.
        num_sink_tokens (`int`): first tokens of a sequence that stay exact.
        least_tokens (`int`): tokens of the shortest sequence of which anything is packed.
        num_kept (`int`): the newest of a full buffer that stay exact when the others are packed.
        num_heard (`int`): tokens before the first that are packed whose queries are heard, where a codec needs some.
        recent_length (`int`): newest of the packed decoded tokens whose rows have more bits, at most.
        has_windows (`bool`): whether the first tokens of a block can be let go of.
        largest (`float`): what numbers have to be below.
    """

    residual_length: int
    num_sink_tokens: int
    least_tokens: int
    num_kept = 0
    num_heard: int = 0
    recent_length: int = 0
    has_windows = False
    largest: float = float("inf")

    @abstractmethod
    def codec(self, key_dim: int, value_dim: int) -> Any:
        """Makes the codec of a layer's heads, not fitted yet; a `ValueError` if options do not fit them."""

    @abstractmethod
    def split(self, padding: torch.Tensor, length: int) -> Split | None:
        """Says how a first prompt of `length` tokens is stored, or `None` if it waits for more of them."""

    @abstractmethod
    def num_packed(self, count: int, *, is_prompt: bool) -> int:
        """How many of the first of `count` exact tokens are packed."""

    @property
    def fixed(self) -> Codec | None:
        """The codec, if it is the same whatever tokens there are."""
        return None

    def joins(self, *, is_prompt: bool) -> bool:
        """Whether tokens join a block of decoded ones, and others that follow may join theirs."""
        return True

    def without_recent(self) -> Packing:
        """Returns the packing that codes the newest packed tokens as all others."""
        return self

    def recent_codec(self, codec: Any) -> Any:
        """Returns the codec of the newest packed tokens, given that of the others; `None` if it is the same."""
        return None

    def num_in_front(self, prefix: ExactPrefix) -> int:
        """Tokens of a prefix that are exact of the sequence that has most of them packed."""
        return self.num_sink_tokens

    @abstractmethod
    def encode(
        self,
        codec: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        padding: torch.Tensor | None,
        valid: torch.Tensor | None,
        *,
        is_prompt: bool,
    ) -> tuple[Block, torch.Tensor | None]:
        """
        Packs consecutive tokens.

        Args:
            codec: the layer's, fitted.
            keys, values (`torch.Tensor` of shape `[B, H, T, D]`): the tokens.
            start (`int`): position of the first.
            padding (`torch.Tensor` of shape `[B]`, *optional*): left padding of every sequence.
            valid (`torch.Tensor` of shape `[B, T]`, bool, *optional*): tokens that are read; all by default.
            is_prompt (`bool`): whether they came at once.

        Returns:
            The block, and which tokens `[B, T]` it cannot hold, if that is not an error already.

        Raises:
            ValueError: if states cannot be stored.
        """

    @abstractmethod
    def blank(self, codec: Any, batch_size: int, num_heads: int, start: int, device: torch.device) -> Block:
        """Makes a block of no tokens for decoded ones to join."""

    @abstractmethod
    def choose(self, codec: Any, query: torch.Tensor) -> tuple[str, bool]:
        """Chooses the kernel for queries, as `choose_kernel` does."""


@dataclass(frozen=True)
class RowPacking(Packing):
    """
    Packs every token by itself, as a row of bytes.

    Attributes:
        codecs (`Codec` or `Callable`): the codec, or called with the head dims of keys and values it makes one.
        residual_length, num_sink_tokens, least_tokens, num_heard, largest, recent_length (*optional*): see `Packing`.
        recent_nbits (`int`, *optional*, defaults to 0): how many bits a number recent rows have more.
    """

    codecs: Codec | Callable[[int, int], Codec]
    residual_length: int = 0
    num_sink_tokens: int = 0
    least_tokens: int = 1
    num_heard: int = 0
    largest: float = float("inf")
    recent_length: int = 0
    recent_nbits: int = 0

    has_windows = True

    @property
    def num_kept(self) -> int:  # type: ignore[override]
        # The newest tokens are read most: with buffers that are emptied whole, KL is a quarter to a half higher
        return self.residual_length // 4 if self.recent_length else 3 * self.residual_length // 5

    @property
    def fixed(self) -> Codec | None:
        return self.codecs if isinstance(self.codecs, Codec) else None

    def codec(self, key_dim: int, value_dim: int) -> Codec:
        return self.codecs if isinstance(self.codecs, Codec) else self.codecs(key_dim, value_dim)

    def without_recent(self) -> RowPacking:
        return replace(self, recent_length=0)

    def recent_codec(self, codec: Codec) -> Codec | None:
        return codec.finer(self.recent_nbits) if self.recent_length and isinstance(codec, RowCodec) else None

    def split(self, padding: torch.Tensor, length: int) -> Split | None:
        has_enough = length - padding >= self.least_tokens
        if not bool(has_enough.any()):
            return None
        # More may be padding than there are tokens so far
        count = torch.where(has_enough, self.num_sink_tokens, (length - padding).clamp(min=0))
        return Split(count, int((padding + count)[has_enough].min()), ~has_enough)

    def num_packed(self, count: int, *, is_prompt: bool) -> int:
        return count

    def encode(
        self,
        codec: Codec,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        padding: torch.Tensor | None,
        valid: torch.Tensor | None,
        *,
        is_prompt: bool,
    ) -> tuple[RowBlock, torch.Tensor | None]:
        rows = codec.encode(keys, values, Positions(start, padding))
        return RowBlock(*rows, start, keys.shape[2]), codec.too_large(*rows)

    def blank(self, codec: Codec, batch_size: int, num_heads: int, start: int, device: torch.device) -> RowBlock:
        heads = batch_size, num_heads, 0
        keys, values = (torch.zeros(*heads, size, dtype=torch.uint8, device=device) for size in codec.row_sizes)
        return RowBlock(keys, values, start, 0)

    def choose(self, codec: Codec, query: torch.Tensor) -> tuple[str, bool]:
        return choose_kernel(query) if codec.has_kernels else ("torch", False)


@dataclass(frozen=True)
class GroupPacking(Packing):
    """
    Packs tokens in chunks, in which groups of values share scales.

    Attributes:
        make_codec (`Callable`): called with the head dims of keys and values.
        residual_length, num_sink_tokens (`int`): see `Packing`.
        least_tokens (`int`): tokens of a group of keys.
        has_whole_groups (`bool`): whether only whole groups of a prompt are packed.
    """

    make_codec: Callable[[int, int], GroupCodec]
    residual_length: int
    num_sink_tokens: int
    least_tokens: int
    has_whole_groups: bool

    def codec(self, key_dim: int, value_dim: int) -> GroupCodec:
        return self.make_codec(key_dim, value_dim)

    def split(self, padding: torch.Tensor, length: int) -> Split:
        real = [length - pad for pad in padding.tolist()]
        packed = [self.num_packed(count, is_prompt=True) for count in real]
        count = [
            max(own - own_packed, min(self.num_sink_tokens, own), 0)
            for own, own_packed in zip(real, packed, strict=True)
        ]
        # Sequences end together, so groups are counted back from the end: the same alone and padded
        return Split(torch.tensor(count), length - max(packed), torch.zeros(len(real), dtype=torch.bool))

    def num_packed(self, count: int, *, is_prompt: bool) -> int:
        if not is_prompt:
            return count - count % self.residual_length
        group = self.least_tokens
        if count < group:
            return 0
        return count - count % group if self.has_whole_groups else count

    def joins(self, *, is_prompt: bool) -> bool:
        return not is_prompt

    def num_in_front(self, prefix: ExactPrefix) -> int:
        return prefix.num_slots

    def encode(
        self,
        codec: GroupCodec,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        padding: torch.Tensor | None,
        valid: torch.Tensor | None,
        *,
        is_prompt: bool,
    ) -> tuple[GroupBlock, torch.Tensor | None]:
        length = keys.shape[2]
        num_chunks = 1 if is_prompt else length // self.residual_length
        states = codec.encode(keys, values, valid, num_chunks=num_chunks, is_prompt=is_prompt)
        return GroupBlock(*states, start=start, num_chunks=num_chunks, length=length), None

    def blank(
        self, codec: GroupCodec, batch_size: int, num_heads: int, start: int, device: torch.device
    ) -> GroupBlock:
        states = codec.blank(batch_size, num_heads, 1, self.residual_length, device)
        return GroupBlock(*states, start=start, num_chunks=0, length=0)

    def choose(self, codec: GroupCodec, query: torch.Tensor) -> tuple[str, bool]:
        # Factors across groups have no kernels
        return ("torch", False) if codec.keys.tile_length else choose_kernel(query, MAX_NUM_COMPILED_QUERIES)
