"""Everything that a layer of a `GEARCache` holds beside its options: what a file of a cache keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcache_plugins.layers.residual_buffer import ResidualBuffer

from .storage import CompressedBlock, ExactPrefix


class Block(Protocol):
    """Consecutive tokens that are compressed."""

    start: int
    length: int


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LayerState:
    """
    A layer between two updates, however it compresses.

    Attributes:
        dtype (`torch.dtype`): of the states that came in.
        batch_size, num_heads, key_head_dim, value_head_dim (`int`): their sizes.
        length (`int`): tokens of the sequence, padding included.
        counters (`dict[str, int]`): what `stats()` counts.
        prefix (`ExactPrefix`, *optional*): exact tokens in front.
        blocks (`Sequence[Block]`): compressed tokens.
        is_open (`bool`): whether further decoded tokens join the last block.
        buffer (`ResidualBuffer`, *optional*): exact tokens behind.
        padding (`torch.Tensor` of shape `[batch_size]`, *optional*): left padding of every item.
        held_start (`int`): position before which a layer of a window has let go of everything.
    """

    dtype: torch.dtype
    batch_size: int
    num_heads: int
    key_head_dim: int
    value_head_dim: int
    length: int
    counters: dict[str, int]
    prefix: ExactPrefix | None
    blocks: Sequence[Block]
    is_open: bool
    buffer: ResidualBuffer | None
    padding: torch.Tensor | None
    held_start: int


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class GEARLayerState(LayerState):
    """A `GEARLayer` between two updates."""

    blocks: list[CompressedBlock]
