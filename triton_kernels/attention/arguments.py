"""The arguments of `attend_kernel` that say how keys or values are stored.

Legend as in `attend.py`.
"""

from collections.abc import Sequence

import torch

from kvcache_plugins.triton_kernels.dot import block_size

from .compressed_tensors import CompressedTensors
from .packing import Packing, packing_of
from .side_layout import SideLayout


# Of prompts and of decoded tokens by default: one kernel reads both
_RANKS = (4, 2)


def side_arguments(name: str, side: CompressedTensors, head_dim: int) -> dict[str, object]:
    """The kernel arguments for the keys or the values."""
    if side.scale.stride() != side.zero.stride():
        raise ValueError("`scale` and `zero` must have the same strides")
    chunk_length = side.codes.shape[3]
    covered, rank = _low_rank_size(side)
    return {
        **_pointer(f"{name}_codes", side.codes, "bhm"),
        f"{name}_scale_ptr": side.scale,
        f"{name}_zero_ptr": side.zero,
        **_strides(f"{name}_scale", _scale_strides(side), "bhm"),
        **_pointer(f"{name}_a", side.low_rank_a, "bhm"),
        **_pointer(f"{name}_b", side.low_rank_b, "bhm"),
        **_entry_arguments(name, side),
        f"{name}_rank": rank,
        f"{name}_low_rank_start": chunk_length - covered,
        name.upper(): side_layout(side, head_dim),
    }


def side_layout(side: CompressedTensors, head_dim: int) -> SideLayout:
    """Makes the constants that a kernel is compiled for of a side's tensors."""
    packing = side_packing(side, head_dim)
    by_channel = side.axis == "channel"
    covered, rank = _low_rank_size(side)
    return SideLayout(
        dim=head_dim,
        pieces=packing.pieces,
        codes_stride_t=side.codes.stride(3),
        scale_stride_s=side.scale.stride(3),
        by_channel=by_channel,
        num_groups=0 if by_channel else side.scale.shape[4],
        tokens_per_group=tokens_per_group(side),
        ranks=() if covered == 0 else _RANKS if rank in _RANKS else (rank,),
        block_rank=block_size(rank),
        has_outliers=has_outliers(side),
        channel_bits=(head_dim - 1).bit_length(),
    )


def _scale_strides(side: CompressedTensors) -> list[int]:
    """How many rows of scales lie between items, heads and chunks, so that where they begin is known to be a row."""
    row = side.scale.stride(3)
    strides = [
        0 if size == 1 else stride for size, stride in zip(side.scale.shape[:3], side.scale.stride(), strict=False)
    ]
    if any(stride % row for stride in strides):
        raise ValueError("`scale` has to consist of rows as far apart as those of a chunk")
    return [stride // row for stride in strides]


def _low_rank_size(side: CompressedTensors) -> tuple[int, int]:
    """Tokens that the low-rank part covers, and R; zeros without it."""
    a, b = side.low_rank_a, side.low_rank_b
    if a is None or b is None or a.shape[3] == 0:
        return 0, 0
    if any(factor.stride()[3:] != (factor.shape[4], 1) for factor in (a, b)):
        raise ValueError("rows of `low_rank_a` and of `low_rank_b` must lie behind each other")
    return a.shape[3], a.shape[4]


def has_outliers(side: CompressedTensors) -> bool:
    """Whether a side has any."""
    return side.outlier_indices is not None and side.outlier_indices.shape[3] > 0


def tokens_per_group(side: CompressedTensors) -> int:
    """Tokens that share a scale, 0 if it is all of a chunk or none."""
    num_groups = side.scale.shape[3]
    if side.axis == "channel" and side.group_size is not None:
        # A chunk of one group is read by the kernel of many
        return side.group_size
    return 0 if side.axis == "token" or num_groups == 1 else side.codes.shape[3] // num_groups


def side_packing(side: CompressedTensors, head_dim: int) -> Packing:
    """How the side's codes are taken apart."""
    num_groups = side.scale.shape[4] if side.axis == "token" else 1
    return packing_of(head_dim, side.nbits, head_dim // num_groups, _is_even(side.codes))


def join_chunks(side: CompressedTensors) -> CompressedTensors:
    """The side with all chunks as one, where chunks hold nothing but codes and scales that lie behind each other."""
    tensors = (side.codes, side.scale, side.zero)
    is_plain = not has_outliers(side) and (side.low_rank_a is None or side.low_rank_a.shape[3] == 0)
    if not is_plain or any(each.shape[2] > 1 and each.stride(2) != each.shape[3] * each.stride(3) for each in tensors):
        return side
    codes, scale, zero = (each.flatten(2, 3).unsqueeze(2) for each in tensors)
    return side._replace(codes=codes, scale=scale, zero=zero)


def _is_even(codes: torch.Tensor) -> bool:
    return codes.data_ptr() % 2 == 0 and all(stride % 2 == 0 for stride in codes.stride()[:4])


def _pointer(name: str, tensor: torch.Tensor | None, dimensions: str) -> dict[str, object]:
    strides = (0,) * len(dimensions) if tensor is None else tensor.stride()[: len(dimensions)]
    return {f"{name}_ptr": tensor, **_strides(name, strides, dimensions)}


def _strides(name: str, strides: Sequence[int], dimensions: str) -> dict[str, object]:
    """The strides by name."""
    return {f"{name}_stride_{dimension}": stride for dimension, stride in zip(dimensions, strides, strict=True)}


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
