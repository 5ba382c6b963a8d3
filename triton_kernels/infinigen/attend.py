"""Attention of one new token to chosen tokens and the newest ones: a launch for splits of both, and one to merge them.

The number of chosen tokens is on the device. Programs of a head take turns at tiles of its chosen tokens, and the last
program takes the tail. Tokens beyond the count are neither read nor counted.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, K slots of a
selection, S programs of a head.
"""

import torch
import triton
import triton.language as tl

from ..arithmetic import LOG2_E, block_size, dot_precision, update_softmax
from ..attention.partials import Partials, device_num_sms, empty_partials, merge_splits
from ..launch import Launch
from .choose import allowed_tokens, token_mask_arguments


_BLOCK_TOKENS = 32
_PROGRAMS_PER_SM = 2
# Tiles that a program takes at least, as merging its result costs about one
_MIN_TILES = 2
# Channels up to which four warps have enough registers for tiles in float32
_FEW_CHANNELS = 64
# Numbers of splits that are read at once
_MERGED_NUMBERS = 4096
_MAX_BLOCK_CHANNELS = 64
# Arguments that differ from step to step: kernels for each divisibility would gain nothing, and be compiled amid steps
_NOT_SPECIALIZED = [
    "mask_stride_b",
    "mask_stride_t",
    "num_heads",
    "num_queries",
    "num_slots",
    "num_tail",
    "tail_capacity",
    "limit",
    "num_splits",
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["mask_ptr", "fetched_ptr"])
def attend_chosen_kernel(
    query_ptr, rows_ptr, slots_ptr, count_ptr, tail_keys_ptr, tail_values_ptr, mask_ptr, mask_stride_b, mask_stride_t,
    output_ptr, maximum_ptr, total_ptr, fetched_ptr, num_heads, num_queries, num_slots, num_tail, tail_capacity, limit,
    scale, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend to some tiles of one head's chosen tokens, or to its tail."""
    matrix = tl.program_id(0).to(tl.int64)
    batch = matrix // num_heads
    split, tail_split = tl.program_id(1), tl.num_programs(1) - 1
    if mask_ptr is not None:
        mask_ptr += batch * mask_stride_b
    rows = tl.arange(0, BLOCK_G)
    row_in_use = rows < num_queries
    key_channels, value_channels = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    query_ptrs = query_ptr + (matrix * num_queries + rows[:, None]) * KEY_DIM + key_channels[None, :]
    query = tl.load(query_ptrs, mask=row_in_use[:, None] & (key_channels < KEY_DIM)[None, :], other=0.0)
    query = query.to(tl.float32)
    scale_base_2 = scale * LOG2_E

    is_tail = split == tail_split
    keys_ptr = rows_ptr + matrix * limit * (KEY_DIM + VALUE_DIM)
    values_ptr = keys_ptr + KEY_DIM
    key_stride, value_stride = KEY_DIM + VALUE_DIM, KEY_DIM + VALUE_DIM
    num_tokens = tl.minimum(tl.load(count_ptr + matrix), limit).to(tl.int32)
    num_chosen = num_tokens
    first_token = split * BLOCK_T
    step = tail_split * BLOCK_T
    if is_tail:
        keys_ptr = tail_keys_ptr + matrix * tail_capacity * KEY_DIM
        values_ptr = tail_values_ptr + matrix * tail_capacity * VALUE_DIM
        key_stride, value_stride = KEY_DIM, VALUE_DIM
        tl.atomic_add(fetched_ptr, num_tokens.to(tl.int64), sem="relaxed")
        num_tokens = num_tail
        num_chosen = 0
        first_token = 0
        step = BLOCK_T
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    output = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(first_token, num_tokens, step):
        tokens = start + tl.arange(0, BLOCK_T)
        in_use = tokens < num_tokens
        slot_ptrs = slots_ptr + matrix * limit + tokens
        slots = tl.load(slot_ptrs, mask=tokens < num_chosen, other=0).to(tl.int32)
        positions = tl.where(is_tail, num_slots + tokens, slots)
        allowed = in_use & allowed_tokens(positions, num_slots + num_tail, mask_ptr, mask_stride_t, 0)
        key_ptrs = keys_ptr + tokens.to(tl.int64)[:, None] * key_stride + key_channels[None, :]
        keys = tl.load(key_ptrs, mask=in_use[:, None] & (key_channels < KEY_DIM)[None, :], other=0.0).to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_base_2
        scores = tl.where(row_in_use[:, None] & allowed[None, :], scores, float("-inf"))
        probabilities, decay, maximum, total = update_softmax(scores, maximum, total, 1)
        value_ptrs = values_ptr + tokens.to(tl.int64)[:, None] * value_stride + value_channels[None, :]
        value_in_use = in_use[:, None] & (value_channels < VALUE_DIM)[None, :]
        values = tl.load(value_ptrs, mask=value_in_use, other=0.0).to(tl.float32)
        output = output * decay[:, None] + tl.dot(probabilities, values, input_precision=PRECISION)
    places = (matrix * tl.num_programs(1) + split) * num_queries + rows
    tl.store(maximum_ptr + places, maximum, mask=row_in_use)
    tl.store(total_ptr + places, total, mask=row_in_use)
    output_ptrs = output_ptr + places[:, None] * VALUE_DIM + value_channels[None, :]
    tl.store(output_ptrs, output, mask=row_in_use[:, None] & (value_channels < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def merge_kernel(
    output_ptr, maximum_ptr, total_ptr, result_ptr, num_queries, num_splits, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some channels of one head's result; a query that may attend to nothing gets zeros."""
    rows = tl.arange(0, BLOCK_M)
    first_channel = tl.program_id(1) * BLOCK_V
    channels = first_channel + tl.arange(0, BLOCK_V)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # fmt: off
    output, maximum, total = merge_splits(
        output, maximum, total, output_ptr, maximum_ptr, total_ptr, num_splits, rows, num_queries, first_channel,
        VALUE_DIM, BLOCK_V, BLOCK_S)
    # fmt: on
    output = output / tl.where(total > 0, total, 1.0)[:, None]
    places = tl.program_id(0).to(tl.int64) * num_queries + rows
    in_use = (rows < num_queries)[:, None] & (channels < VALUE_DIM)[None, :]
    result_ptrs = result_ptr + places[:, None] * VALUE_DIM + channels[None, :]
    tl.store(result_ptrs, output.to(result_ptr.dtype.element_ty), mask=in_use)


def prepare_attention(
    query: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    tail: tuple[torch.Tensor, torch.Tensor],
    num_tail: int,
    num_slots: int,
    mask: torch.Tensor | None,
    scale: float,
    fetched: torch.Tensor,
    num_sms: int | None = None,
) -> tuple[Launch, Launch]:
    """
    Prepare the two launches of attention; the result of the second is `[B, H * G, 1, E]` in the query's dtype.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, 1, D]`): queries, contiguous.
        rows (`torch.Tensor` of shape `[B, H, K, D + E]`): keys and values of chosen tokens, contiguous.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): positions of the chosen tokens.
        count (`torch.Tensor` of shape `[B, H]`, int64): chosen tokens of each head, the first ones.
        tail (two `torch.Tensor` of shape `[B, H, capacity, D or E]`): newest tokens, `num_tail` in use, from position
            `num_slots` on.
        mask (`torch.Tensor` of shape `[B or 1, tokens]`, bool, *optional*): True for positions that are attended to.
        scale (`float`): factor of the scores.
        fetched (`torch.Tensor` of shape `[]`, int64): sum, to which all counts are added.
        num_sms (`int`, *optional*, defaults to the device's): multiprocessors to keep busy.
    """
    batch_size, num_heads, limit = slots.shape
    num_queries = query.shape[1] // num_heads
    key_dim, value_dim = (states.shape[3] for states in tail)
    num_matrices = batch_size * num_heads
    most_programs = _PROGRAMS_PER_SM * (num_sms or device_num_sms(query.device))
    most_splits = triton.cdiv(triton.cdiv(limit, _BLOCK_TOKENS), _MIN_TILES)
    # Splits of chosen tokens, and one of the tail
    num_splits = 1 + max(min(most_programs // num_matrices, most_splits), 1)
    partials = empty_partials(query.view(batch_size, num_heads, num_queries, key_dim), num_splits, value_dim)
    result = query.new_empty(*query.shape[:3], value_dim)
    arguments = {
        "query_ptr": query,
        "rows_ptr": rows,
        "slots_ptr": slots,
        "count_ptr": count,
        "tail_keys_ptr": tail[0],
        "tail_values_ptr": tail[1],
        **token_mask_arguments(mask),
        **_partial_arguments(partials),
        "fetched_ptr": fetched,
        "num_heads": num_heads,
        "num_queries": num_queries,
        "num_slots": num_slots,
        "num_tail": num_tail,
        "tail_capacity": tail[0].shape[2],
        "limit": limit,
        "scale": scale,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PRECISION": dot_precision(query.dtype),
        "BLOCK_G": block_size(num_queries),
        "BLOCK_T": _BLOCK_TOKENS,
        "BLOCK_K": block_size(key_dim),
        "BLOCK_V": block_size(value_dim),
    }
    is_wide = query.dtype == torch.float32 and max(key_dim, value_dim) > _FEW_CHANNELS
    options = {"num_stages": 1, "num_warps": 8 if is_wide else 4}
    attention = Launch(attend_chosen_kernel, (num_matrices, num_splits), arguments, options, partials)
    block_channels = min(triton.next_power_of_2(value_dim), _MAX_BLOCK_CHANNELS)
    block_queries = triton.next_power_of_2(num_queries)
    arguments = {
        **_partial_arguments(partials),
        "result_ptr": result,
        "num_queries": num_queries,
        "num_splits": num_splits,
        "VALUE_DIM": value_dim,
        "BLOCK_M": block_queries,
        "BLOCK_V": block_channels,
        "BLOCK_S": max(_MERGED_NUMBERS // (block_queries * block_channels), 1),
    }
    grid = (num_matrices, triton.cdiv(value_dim, block_channels))
    return attention, Launch(merge_kernel, grid, arguments, {"enable_fp_fusion": False}, result)


def _partial_arguments(partials: Partials) -> dict[str, object]:
    return {f"{name}_ptr": tensor for name, tensor in partials._asdict().items()}
