"""Everything that a GEAR layer holds beside its options: what a file of a cache keeps of it."""

from dataclasses import dataclass

import torch

from kvcache_plugins.layers.residual_buffer import ResidualBuffer

from .storage import CompressedBlock, ExactPrefix


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class GEARLayerState:
    """
    A layer between two updates.

    Attributes:
        dtype (`torch.dtype`): of the states that came in.
        batch_size, num_heads, key_head_dim, value_head_dim (`int`): their sizes.
        length (`int`): tokens of the sequence, padding included.
        counters (`dict[str, int]`): what `stats()` counts.
        prefix (`ExactPrefix`, *optional*): exact tokens in front.
        blocks (`list[CompressedBlock]`): compressed tokens.
        is_open (`bool`): whether further decode chunks join the last block.
        buffer (`ResidualBuffer`, *optional*): exact tokens behind.
        padding (`torch.Tensor` of shape `[batch_size]`, *optional*): left padding of every item.
    """

    dtype: torch.dtype
    batch_size: int
    num_heads: int
    key_head_dim: int
    value_head_dim: int
    length: int
    counters: dict[str, int]
    prefix: ExactPrefix | None
    blocks: list[CompressedBlock]
    is_open: bool
    buffer: ResidualBuffer | None
    padding: torch.Tensor | None
