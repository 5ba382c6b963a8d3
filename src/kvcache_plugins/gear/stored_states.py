"""Compressed keys or values from a file: the tensors that the options ask for, with every index in its range.

Kernels read what lies here by address and do not look whether an index leads out of it.

Legend: B batch, H heads, M chunks, L tokens a chunk, D head dim, R rank, N outliers.
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.ops.compressed_states import CompressedStates
from kvcache_plugins.ops.compression_steps import STORAGE_DTYPE
from kvcache_plugins.ops.outliers import OUTLIER_TILE, channel_bits, index_dtype, num_offsets
from kvcache_plugins.ops.quantization import Grouping, packed_size

from .config import GEARConfig, SideConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SideLayout:
    """What is known of one side of a block before its tensors are looked at."""

    side: SideConfig
    grouping: Grouping
    batch_size: int
    num_heads: int
    num_chunks: int
    head_dim: int
    is_rotated: bool
    recent_ratio: float
    # Of several chunks, which are all decoded tokens
    chunk_length: int | None

    @classmethod
    def of(
        cls, name: str, config: GEARConfig, batch_size: int, num_heads: int, head_dim: int, num_chunks: int
    ) -> "SideLayout":
        """Of `"keys"` or `"values"` under some options."""
        is_keys = name == "keys"
        return cls(
            side=config.key if is_keys else config.value,
            grouping=(config.key_grouping if is_keys else config.value_grouping)(head_dim),
            batch_size=batch_size,
            num_heads=num_heads,
            num_chunks=num_chunks,
            head_dim=head_dim,
            is_rotated=config.rotate_values and not is_keys,
            recent_ratio=config.low_rank_recent_ratio,
            chunk_length=config.residual_length if num_chunks > 1 else None,
        )

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.batch_size, self.num_heads, self.num_chunks

    @property
    def ranks(self) -> set[int]:
        """A chunk alone may be a prompt's or of decoded tokens."""
        return {self.side.decode_rank} if self.num_chunks > 1 else {self.side.rank, self.side.decode_rank}


def read_states(tensors: StoredTensors, layout: SideLayout) -> CompressedStates:
    """
    One side of a block.

    Raises:
        ValueError: if a tensor is missing or too much, or of another shape or dtype than it has to be, or holds what
            cannot be.
    """
    head_dim, grouping = layout.head_dim, layout.grouping
    num_bytes = packed_size(head_dim, layout.side.nbits)
    codes = tensors.take("codes", (*layout.dims, layout.chunk_length, num_bytes), torch.uint8)
    length = codes.shape[3]
    group_size = grouping.group_size or length
    if length == 0 or grouping.axis == "channel" and length % group_size:
        raise ValueError(f"chunks of {length} tokens cannot be in groups of {group_size}")
    shape = _scale_shape(layout, length)
    scale, zero = (_finite(name, tensors.take(name, shape, STORAGE_DTYPE)) for name in ("scale", "zero"))
    a, b = _read_low_rank(tensors, layout, length)
    indices, values, offsets = _read_outliers(tensors, layout, length)
    return CompressedStates(
        codes=codes,
        scale=scale,
        zero=zero,
        low_rank_a=a,
        low_rank_b=b,
        outlier_indices=indices,
        outlier_values=values,
        outlier_offsets=offsets,
        nbits=layout.side.nbits,
        grouping=grouping,
        head_dim=head_dim,
        is_rotated=layout.is_rotated,
    )


def _scale_shape(layout: SideLayout, length: int) -> tuple[int, ...]:
    batch_size, _, num_chunks = layout.dims
    group_size = layout.grouping.group_size
    if layout.grouping.axis == "channel":
        return *layout.dims, length // (group_size or length), layout.head_dim
    if group_size is None:
        return batch_size, 1, num_chunks, length, 1
    return *layout.dims, length, layout.head_dim // group_size


def _read_low_rank(
    tensors: StoredTensors, layout: SideLayout, length: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not tensors.has("low_rank_b"):
        if 0 not in layout.ranks:
            raise ValueError(f"the low rank of {layout.side.side}s is missing")
        return None, None
    b = tensors.take("low_rank_b", (*layout.dims, layout.head_dim, None), STORAGE_DTYPE)
    rank = b.shape[4]
    # Only of a prompt there may be factors of its newest tokens alone
    is_partial = layout.num_chunks == 1 and layout.recent_ratio < 1
    a = tensors.take("low_rank_a", (*layout.dims, None if is_partial else length, rank), STORAGE_DTYPE)
    if rank == 0 or rank not in layout.ranks or a.shape[3] > length:
        raise ValueError(
            f"the low rank of {layout.side.side}s has to be one of {sorted(layout.ranks)} over {length} tokens at "
            f"most, but is {rank} over {a.shape[3]}"
        )
    return _finite("low_rank_a", a), _finite("low_rank_b", b)


def _read_outliers(
    tensors: StoredTensors, layout: SideLayout, length: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if layout.side.sparsity == 0 or not tensors.has("outlier_offsets"):
        return None, None, None
    shape = layout.batch_size, 1, layout.num_chunks
    offsets = tensors.take("outlier_offsets", (*shape, num_offsets(length, layout.num_heads)), torch.int32)
    indices = tensors.take("outlier_indices", (*shape, None), index_dtype(layout.head_dim))
    values = tensors.take("outlier_values", indices.shape, STORAGE_DTYPE)
    num_outliers = indices.shape[3]
    counts = offsets.diff(dim=3)
    # No place of a tile and head is there twice
    most = OUTLIER_TILE * layout.head_dim
    if bool((offsets[..., 0] != 0).any() | (counts < 0).any() | (counts > most).any()):
        raise ValueError("the offsets of outliers have to rise from 0 on, by no more than a tile has places")
    if int(offsets[..., -1].max()) > num_outliers:
        raise ValueError(f"the offsets of outliers have to be at most {num_outliers}, of which there are")
    bits = channel_bits(layout.head_dim)
    tokens, channels = indices >> bits, indices & ((1 << bits) - 1)
    if bool(((tokens < 0) | (tokens >= OUTLIER_TILE) | (channels >= layout.head_dim)).any()):
        raise ValueError("the indices of outliers have to be places of a tile")
    return indices, _finite("outlier_values", values), offsets


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"`{name}` has to be finite")
    return tensor
