"""Attention of a decode step in one launch: to older rows, recent rows and exact tokens, with the merge inside.

Legend as in `attend.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..arithmetic import block_size, dot_precision
from ..attention.combine import parts_arguments
from ..attention.dense_part import DensePart
from ..attention.masks import mask_arguments
from ..attention.partials import device_num_sms, empty_partials
from ..launch import OPTIONS, Launch, tensor_arguments
from .attend import (
    LEAST_DEVIATION,
    angle_arguments,
    block_channels,
    contiguous,
    has_two_bits,
    row_arguments,
    split_rows,
    tile_shape,
)
from .launches import CodedRows, RotaryAngles
from .step_kernel import step_kernel


# Numbers of a thread that are merged at once
_NUMBERS_AT_ONCE = 32


class RowSegment(NamedTuple):
    """
    Rows that follow each other; arguments are those of `attend.prepare_rows`.

    Args:
        keys, values, start, length, num_tokens, padding, mask: as there.
    """

    keys: CodedRows
    values: CodedRows
    start: int
    length: int
    num_tokens: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def shares_tables(first: RowSegment, second: RowSegment) -> bool:
    """Return True if formats of two segments differ in widths and row sizes alone."""
    for own, other in zip(first[:2], second[:2], strict=True):
        tables = [(each.layout.order, each.layout.mean, each.layout.deviation) for each in (own, other)]
        if own.coefficients is not other.coefficients:
            return False
        if any(one is not another for one, another in zip(*tables, strict=True)):
            return False
    return True


def prepare_step(
    query: torch.Tensor,
    segments: Sequence[RowSegment],
    angles: RotaryAngles | None,
    exact_parts: Sequence[DensePart],
    *,
    scale: float,
    packed: bool,
    num_sms: int | None = None,
) -> Launch:
    """
    Prepare the launch whose result is attention `[B, H, rows, D]` to all tokens, zero where a row may attend to
    nothing. It may be launched again when the one before has ended.

    Args:
        query (`torch.Tensor` of shape `[B, H, rows, D]`): queries, as in `attend.prepare_rows`.
        segments (one or two `RowSegment`): rows without bases; those of the second `shares_tables` with the first.
        angles (`RotaryAngles`, *optional*): as in `attend.prepare_rows`, for the positions of both.
        exact_parts (at most two `DensePart`): stretches that are stored as they are.
        scale, packed, num_sms: as in `attend.prepare_rows`.
    """
    batch_size, num_heads, num_rows, _ = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    exact_parts = [part for part in exact_parts if part.keys.shape[2] > 0]
    older = segments[0]
    head_dim, value_dim = older.keys.layout.head_dim, older.values.layout.head_dim
    is_float32 = query.dtype == torch.float32
    has_pairs = packed and not is_float32
    block_keys, block_values = block_channels(head_dim), block_channels(value_dim)
    block_rows, block_tokens, num_warps = tile_shape(
        max(block_keys, block_values), num_rows, has_basis=False, is_float32=is_float32
    )
    block_queries = block_rows // 2 if angles is not None and num_rows <= block_rows // 2 else block_rows
    num_row_blocks = triton.cdiv(num_rows, block_queries)
    num_programs = batch_size * num_heads * num_row_blocks
    num_sms = num_sms or device_num_sms(query.device)
    splits = [split_rows(segment.length, block_tokens, num_programs, num_sms) for segment in segments]
    num_places = sum(number for number, _ in splits) + bool(exact_parts)
    partials = empty_partials(query, num_places, value_dim)
    result = query.new_empty(batch_size, num_heads, num_rows, value_dim)
    arguments = {
        **tensor_arguments("query", query, "bhr"),
        "result_ptr": result,
        "arrival_ptr": torch.zeros(num_programs, dtype=torch.int32, device=query.device),
        **{f"{name}_ptr": tensor for name, tensor in partials._asdict().items()},
        "key_coefficient_ptr": older.keys.coefficients,
        "key_order_ptr": contiguous(older.keys.layout.order),
        "key_mean_ptr": contiguous(older.keys.layout.mean),
        "key_deviation_ptr": contiguous(older.keys.layout.deviation),
        "value_coefficient_ptr": older.values.coefficients,
        "value_deviation_ptr": contiguous(older.values.layout.deviation),
        **angle_arguments(angles),
        **parts_arguments(exact_parts, num_heads, num_rows),
        "num_heads": num_heads,
        "num_rows": num_rows,
        "scale": scale,
        "KEY_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HAS_RECENT": len(segments) > 1,
        "HAS_EXACT": bool(exact_parts),
        "LEAST_DEVIATION": LEAST_DEVIATION[is_float32],
        "DTYPE": tl.float32 if is_float32 else tl.float16,
        "PAIRS": has_pairs,
        "PRECISION": dot_precision(query.dtype),
        "BLOCK_Q": block_queries,
        "BLOCK_R": block_rows,
        "BLOCK_T": block_tokens,
        "BLOCK_K": block_keys,
        "BLOCK_V": block_values,
        "VALUE_ROTATION": value_dim & -value_dim,
        "BLOCK_E": block_size(block_queries),
        "BLOCK_S": max(1, _NUMBERS_AT_ONCE * 32 * num_warps // (block_queries * block_values)),
    }
    names = ("older", "recent")
    for index, name in enumerate(names):
        # Without recent rows the older ones are given twice, and count once
        segment, (num_splits, tokens_per_split) = segments[min(index, len(segments) - 1)], splits[-1 if index else 0]
        arguments |= {
            **_segment_arguments(name, segment, num_heads, num_rows),
            f"{name}_num_splits": num_splits,
            f"{name}_tokens_per_split": tokens_per_split,
            f"{name.upper()}_TWO_BITS": has_pairs and has_two_bits(segment.values, block_values),
        }
    options = {**OPTIONS, "num_warps": num_warps, "num_stages": 1}
    return Launch(step_kernel, (batch_size * num_heads, num_places, num_row_blocks), arguments, options, result)


def _segment_arguments(name: str, segment: RowSegment, num_heads: int, num_rows: int) -> dict[str, object]:
    return {
        **row_arguments(f"{name}_key", segment.keys.rows),
        **row_arguments(f"{name}_value", segment.values.rows),
        f"{name}_key_width_ptr": contiguous(segment.keys.layout.widths),
        f"{name}_value_width_ptr": contiguous(segment.values.layout.widths),
        **mask_arguments(segment.mask, num_heads, num_rows, f"{name}_mask"),
        f"{name}_padding_ptr": segment.padding,
        f"{name}_position": segment.start,
        f"{name}_length": segment.length,
        f"{name}_length_ptr": segment.num_tokens,
    }
