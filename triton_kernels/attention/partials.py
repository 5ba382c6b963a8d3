"""Attention per split before its normalisation: stored by `values.py`, merged by `combine`.

Legend as in `attend.py`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Partials(NamedTuple):
    """
    An attention per split before its normalisation, float32.

    Args:
        output (`torch.Tensor` of shape `[B, H, splits, rows, value D]`): sum of the values, weighted by `2 ** (score -
            maximum)`.
        maximum, total (`torch.Tensor` of shape `[B, H, splits, rows]`): largest score (in base 2: `log2(e)` times the
            usual score; `-inf` where nothing is attended to) and sum of the weights.
    """

    output: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


def empty_partials(query: torch.Tensor, num_splits: int, num_channels: int) -> Partials:
    """Room for the partial results of queries `[B, H, rows, D]`."""
    maximum = query.new_empty(*query.shape[:2], num_splits, query.shape[2], dtype=torch.float32)
    return Partials(maximum.new_empty(*maximum.shape, num_channels), maximum, torch.empty_like(maximum))


def num_split_tiles(num_tiles: int, num_programs: int, num_slots: int, least: int) -> int:
    """
    Count tiles of a split, at least so many, so that programs, one a split of each of a number, fill the slots and
    have the same to do.
    """
    return max(least, triton.cdiv(num_tiles, max(num_slots // max(num_programs, 1), 1)))


@functools.cache
def device_num_sms(device: torch.device) -> int:
    """Count multiprocessors of a device, or a few where there is none."""
    return 16 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def block_arguments(index: int, blocks: Sequence[Partials]) -> dict[str, object]:
    """The arguments of `combine_kernel` for a compressed block; for one too many those of the last, without splits."""
    names = [f"{name}_{index}_ptr" for name in Partials._fields]
    if not blocks:
        return {**dict.fromkeys(names), f"num_splits_{index}": 0}
    block, num_splits = blocks[min(index, len(blocks) - 1)], 0
    if index < len(blocks):
        num_splits = block.output.shape[2]
    return {**dict(zip(names, block, strict=True)), f"num_splits_{index}": num_splits}


@triton.jit
def merge_splits(
    output, maximum, total, output_ptr, maximum_ptr, total_ptr, num_splits, rows, num_rows, first_channel,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Carry output, maximum and total of the online softmax on through the splits of one compressed block."""
    first_split = tl.program_id(0).to(tl.int64) * num_splits
    for block in range(0, num_splits, BLOCK_S):
        splits = block + tl.arange(0, BLOCK_S)
        # fmt: off
        output, maximum, total = _merge_block(
            output, maximum, total, output_ptr, maximum_ptr, total_ptr, first_split + splits, splits < num_splits,
            rows, num_rows, first_channel, VALUE_DIM, BLOCK_V)
        # fmt: on
    return output, maximum, total


@triton.jit
def merge_places(
    output_ptr, maximum_ptr, total_ptr, first_place, count, num_first, distance, rows, num_rows,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """
    Merge what `count` splits have stored, the first `num_first` from `first_place` on and the others `distance` places
    behind them, to attention `[rows, BLOCK_V]`.
    """
    maximum = tl.full([rows.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    output = tl.zeros([rows.shape[0], BLOCK_V], tl.float32)
    for block in range(0, count, BLOCK_S):
        splits = block + tl.arange(0, BLOCK_S)
        places = first_place + splits + tl.where(splits < num_first, 0, distance)
        # fmt: off
        output, maximum, total = _merge_block(
            output, maximum, total, output_ptr, maximum_ptr, total_ptr, places, splits < count, rows, num_rows, 0,
            VALUE_DIM, BLOCK_V)
        # fmt: on
    return output / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _merge_block(
    output, maximum, total, output_ptr, maximum_ptr, total_ptr, places, place_in_use, rows, num_rows, first_channel,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Carry output, maximum and total of the online softmax on through splits at some places."""
    value_channels = first_channel + tl.arange(0, BLOCK_V)
    in_use = place_in_use[:, None] & (rows < num_rows)[None, :]
    offsets = places[:, None] * num_rows + rows[None, :]
    # Other programs of a launch may have stored them: caches of a multiprocessor are passed by
    maxima = tl.load(maximum_ptr + offsets, mask=in_use, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(total_ptr + offsets, mask=in_use, other=0.0, cache_modifier=".cg")
    outputs = tl.load(
        output_ptr + offsets[:, :, None] * VALUE_DIM + value_channels[None, None, :],
        mask=in_use[:, :, None] & (value_channels < VALUE_DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(maxima - reference[None, :])
    decay = tl.exp2(maximum - reference)
    total = total * decay + tl.sum(totals * weights, axis=0)
    output = output * decay[:, None] + tl.sum(outputs * weights[:, :, None], axis=0)
    return output, new_maximum, total
