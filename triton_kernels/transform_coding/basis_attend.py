"""Decode attention over rows in calibrated bases: see `attend`, which codes channels themselves.

Keys are coded before the rotary embedding in a basis that mixes channels of different frequencies. A tile's
components become channels by a product with the head's basis (`basis_tiles`), on tensor cores, and these meet the
queries as those of `attend` do. Values are summed as components, and the sums brought back once.

Legend: B batch, H key/value heads, T tokens, D head dim, K components that have bits.
"""

import torch
import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.attention.masks import mask_arguments
from kvcache_plugins.triton_kernels.attention.partials import Launch

from .attend import (
    angle_arguments,
    block_channels,
    device_num_sms,
    empty_partials,
    num_split_tiles,
    row_arguments,
)
from .basis_kernel import attend_basis_kernel
from .launches import CodedRows, RotaryAngles


# Rows that an instruction of tensor cores takes, and components that one adds up
_BLOCK_ROWS = 8
_LEAST_COMPONENTS = 16
# Channels up to which four warps have registers enough for the basis and the angles of a tile's offsets; of 128
# some are spilled even by eight
_FEW_CHANNELS = 64


def prepare_basis(
    query: torch.Tensor,
    keys: CodedRows,
    values: CodedRows,
    angles: RotaryAngles | None,
    *,
    start: int,
    length: int,
    num_tokens: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float,
    packed: bool,
    num_sms: int | None = None,
) -> Launch:
    """
    The launch that attends to rows: partial results with values as components `[.., .., .., .., K]`, to be merged by
    `combine` when they are channels again.

    The arguments are those of `attend.prepare_rows`, but for the sides.
    """
    basis = keys.table.basis
    assert basis is not None, "keys of a calibration have a basis"
    batch_size, num_heads, num_rows, _ = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    is_float32 = query.dtype == torch.float32
    num_row_blocks = triton.cdiv(num_rows, _BLOCK_ROWS)
    block_tokens, num_warps = _tile_shape(block_channels(keys.table.head_dim), is_float32=is_float32)
    num_programs = batch_size * num_heads * num_row_blocks
    tiles_per_split = num_split_tiles(length, block_tokens, num_programs, num_sms or device_num_sms(query.device))
    num_splits = triton.cdiv(triton.cdiv(length, block_tokens), tiles_per_split)
    partials = empty_partials(query, num_splits, values.table.num_coded)
    arguments = {
        "query_ptr": query,
        "query_stride_b": query.stride(0),
        "query_stride_h": query.stride(1),
        "query_stride_r": query.stride(2),
        **mask_arguments(mask, num_heads, num_rows),
        "output_ptr": partials.output,
        "maximum_ptr": partials.maximum,
        "total_ptr": partials.total,
        **_side_arguments("key", keys),
        "basis_ptr": basis.vectors,
        "step_ptr": basis.steps,
        "factor_ptr": basis.factors,
        "mean_ptr": keys.table.mean,
        **_side_arguments("value", values),
        **angle_arguments(angles),
        "padding_ptr": padding,
        "num_heads": num_heads,
        "num_rows": num_rows,
        "position": start,
        "length": length,
        "length_ptr": num_tokens,
        "tokens_per_split": tiles_per_split * block_tokens,
        "scale": scale,
        "KEY_DIM": keys.table.head_dim,
        "TRELLIS": keys.is_trellis,
        "PADDED": padding is not None,
        "DTYPE": tl.float32 if is_float32 else tl.float16,
        "PAIRS": packed and not is_float32,
        "BLOCK_R": _BLOCK_ROWS,
        "BLOCK_T": block_tokens,
        "BLOCK_D": block_channels(keys.table.head_dim),
        "BLOCK_K": max(_LEAST_COMPONENTS, triton.next_power_of_2(keys.table.num_coded)),
        "BLOCK_V": max(_LEAST_COMPONENTS, triton.next_power_of_2(values.table.num_coded)),
    }
    options = {"num_warps": num_warps, "num_stages": 1}
    grid = (batch_size * num_heads, num_splits, num_row_blocks)
    return Launch(attend_basis_kernel, grid, arguments, partials, options)


def _side_arguments(name: str, side: CodedRows) -> dict[str, object]:
    """The kernel arguments that keys and values both have."""
    return {
        **row_arguments(name, side.rows),
        f"{name}_width_ptr": side.table.widths,
        f"{name}_coefficient_ptr": side.coefficients,
        f"{name.upper()}_COMPONENTS": side.table.num_coded,
    }


def _tile_shape(num_channels: int, *, is_float32: bool) -> tuple[int, int]:
    """Tokens of a tile, and warps that share it."""
    if is_float32:
        return 16, 8
    return 64, (4 if num_channels <= _FEW_CHANNELS else 8)
