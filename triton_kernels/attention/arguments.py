"""The arguments of `attend_kernel` that say how keys or values are stored.

Legend as in `attend.py`.
"""

from collections.abc import Sequence

import torch

from kvcache_plugins.triton_kernels.dot import block_size, min_columns

from .compressed_tensors import CompressedTensors


def side_arguments(
    name: str, side: CompressedTensors, head_dim: int, block_tokens: int, block_rows: int
) -> dict[str, object]:
    """The kernel arguments for the keys or the values."""
    if side.scale.stride() != side.zero.stride():
        raise ValueError("`scale` and `zero` must have the same strides")
    chunk_length = side.codes.shape[3]
    by_channel = side.axis == "channel"
    tokens_per_group = chunk_length // side.scale.shape[3]
    low_rank = side.low_rank_a is not None and side.low_rank_a.shape[3] > 0
    rank = side.low_rank_a.shape[4] if side.low_rank_a is not None and low_rank else 0
    covered = side.low_rank_a.shape[3] if side.low_rank_a is not None else 0
    has_outliers = side.outlier_indices is not None and side.outlier_indices.shape[3] > 0
    scale_strides = list(side.scale.stride()[:4])
    if side.scale.shape[1] == 1:
        scale_strides[1] = 0
    upper = name.upper()
    return {
        **_pointer(f"{name}_codes", side.codes, "bhmT"),
        f"{name}_scale_ptr": side.scale,
        f"{name}_zero_ptr": side.zero,
        **_strides(f"{name}_scale", scale_strides, "bhmS"),
        **_pointer(f"{name}_a", side.low_rank_a, "bhmT"),
        **_pointer(f"{name}_b", side.low_rank_b, "bhmD"),
        **_entry_arguments(name, side),
        f"{name}_low_rank_start": chunk_length - covered,
        f"{name}_tokens_per_group": tokens_per_group if by_channel else 1,
        f"{upper}_DIM": head_dim,
        f"{upper}_NBITS": side.nbits,
        f"{upper}_FOLD": _fold(side, tokens_per_group, block_tokens),
        f"{upper}_CHANNELS_PER_GROUP": 1 if by_channel else head_dim // side.scale.shape[4],
        f"{upper}_RANK": rank,
        f"{upper}_OUTLIERS": has_outliers,
        # Not the block's, which is no narrower than 16 channels
        f"{upper}_CHANNEL_BITS": (head_dim - 1).bit_length(),
        "BLOCK_K" if name == "key" else "BLOCK_V": block_size(head_dim),
        f"BLOCK_{upper}_RANK": max(block_size(rank), min_columns(block_rows)),
    }


def _fold(side: CompressedTensors, tokens_per_group: int, block_tokens: int) -> int:
    """Where scales are applied: to a tile's channels (0), to its tokens (1), or to every code (2, 3)."""
    if side.axis == "channel":
        return 0 if side.scale.shape[3] == 1 or tokens_per_group % block_tokens == 0 else 3
    return 1 if side.scale.shape[4] == 1 else 2


def _pointer(name: str, tensor: torch.Tensor | None, dimensions: str) -> dict[str, object]:
    strides = (0,) * len(dimensions) if tensor is None else tensor.stride()[: len(dimensions)]
    return {f"{name}_ptr": tensor, **_strides(name, strides, dimensions)}


def _strides(name: str, strides: Sequence[int], dimensions: str) -> dict[str, object]:
    """
    The strides by name. A row's is a constant of the kernel (upper case): it hardly varies, and addresses that differ
    by constants share a register.
    """
    arguments: dict[str, object] = {}
    for dimension, stride in zip(dimensions, strides, strict=True):
        argument = f"{name}_stride_{dimension}"
        arguments[argument.upper() if dimension.isupper() else argument] = stride
    return arguments


def _entry_arguments(name: str, side: CompressedTensors) -> dict[str, object]:
    indices, values, offsets = side.outlier_indices, side.outlier_values, side.outlier_offsets
    if indices is None or values is None or offsets is None:
        indices = values = offsets = None
    elif indices.stride() != values.stride():
        raise ValueError("`outlier_indices` and `outlier_values` must have the same strides")
    return {
        f"{name}_entry_index_ptr": indices,
        f"{name}_entry_value_ptr": values,
        f"{name}_entry_stride_b": 0 if indices is None else indices.stride(0),
        f"{name}_entry_stride_m": 0 if indices is None else indices.stride(2),
        f"{name}_offset_ptr": offsets,
        f"{name}_offset_stride_b": 0 if offsets is None else offsets.stride(0),
        f"{name}_offset_stride_m": 0 if offsets is None else offsets.stride(2),
    }
