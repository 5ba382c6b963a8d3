"""Choice of stored tokens by their scores: one program a head, and nothing is sorted.

A token's weight is its attention probability, averaged over the queries of its head's group; tokens of the tail take
part in the softmax. Forced tokens are chosen in any case, others by weight, the largest first, up to a limit. Weights
are positive floats, whose order is that of their bits: the smallest weight that is chosen is found digit by digit, by
counting the weights that are not below each of 16 bounds. Chosen slots are written in their own order.

Legend: B batch, H key/value heads, G query heads a key/value head, N slots in use, W tokens of the tail, K slots of a
selection, D head dim of keys.
"""

import torch
import triton
import triton.language as tl

from ..arithmetic import LOG2_E, update_softmax
from ..launch import Launch


# Scores of a tile, and its tokens at most; products of a tile of the tail
_TILE_SCORES, _MAX_TILE_TOKENS = 4096, 512
_TAIL_PRODUCTS = 8192
_NUM_WARPS = 8
# In the place of the weight of a forced token, and of one that is not to be chosen
_FORCED = tl.constexpr(3.0)
_NEVER = tl.constexpr(-1.0)
# Bounds of a digit, and digits of the bits of a float that is not negative: four bits each, of the last one three
_BOUNDS = tl.constexpr(16)
_NUM_DIGITS = tl.constexpr(8)
_FIRST_SHIFT = tl.constexpr(27)
# Arguments that differ from step to step: kernels for each divisibility would gain nothing, and be compiled amid steps
_NOT_SPECIALIZED = [
    "mask_stride_b",
    "mask_stride_t",
    "num_heads",
    "num_queries",
    "num_slots",
    "num_tail",
    "tail_capacity",
    "length",
    "limit",
    "num_first",
    "num_newest",
]


def token_mask_arguments(mask: torch.Tensor | None) -> dict[str, object]:
    """List the kernel arguments of a mask `[B or 1, tokens]`, bool."""
    if mask is None:
        return {"mask_ptr": None, "mask_stride_b": 0, "mask_stride_t": 0}
    stride = 0 if len(mask) == 1 else mask.stride(0)
    return {"mask_ptr": mask.view(torch.uint8), "mask_stride_b": stride, "mask_stride_t": mask.stride(1)}


@triton.jit
def allowed_tokens(positions, length, mask_ptr, mask_stride_t, first):
    """Return whether tokens at positions may be attended to."""
    allowed = (positions < length) & (positions >= first)
    if mask_ptr is not None:
        seen = tl.load(mask_ptr + positions.to(tl.int64) * mask_stride_t, mask=positions < length, other=0)
        allowed &= seen != 0
    return allowed


@triton.jit
def first_position(padding_ptr, batch):
    """Return the position of a sequence's first real token."""
    first = 0
    if padding_ptr is not None:
        first = tl.load(padding_ptr + batch).to(tl.int32)
    return first


@triton.jit
def _load_scores(scores_ptr, rows, row_in_use, slots, allowed, num_slots):
    """Load scores `[BLOCK_G, BLOCK_T]` of a head's slots, -inf for those that are not allowed."""
    in_use = row_in_use[:, None] & allowed[None, :]
    return tl.load(scores_ptr + rows[:, None].to(tl.int64) * num_slots + slots[None, :], in_use, float("-inf"))


@triton.jit(
    do_not_specialize=_NOT_SPECIALIZED,
    do_not_specialize_on_alignment=["mask_ptr", "padding_ptr"],
)
def choose_kernel(
    scores_ptr, query_ptr, tail_ptr, mask_ptr, mask_stride_b, mask_stride_t, padding_ptr, ratio_ptr, wanted_ptr,
    weights_ptr, slots_ptr, count_ptr, num_heads, num_queries, num_slots, num_tail, tail_capacity, length, limit,
    num_first, num_newest, min_weight, scale, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Choose the slots of one head."""
    matrix = tl.program_id(0).to(tl.int64)
    batch = matrix // num_heads
    if mask_ptr is not None:
        mask_ptr += batch * mask_stride_b
    first_real = first_position(padding_ptr, batch)
    scores_ptr += matrix * num_queries * num_slots
    weights_ptr += matrix * num_slots
    slots_ptr += matrix * limit
    rows = tl.arange(0, BLOCK_G)
    row_in_use = rows < num_queries
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)

    # Tokens behind the pool; the newest may not be stored yet
    channels = tl.arange(0, BLOCK_D)
    channel_in_use = channels < HEAD_DIM
    query_ptrs = query_ptr + (matrix * num_queries + rows[:, None]) * HEAD_DIM + channels[None, :]
    query = tl.load(query_ptrs, mask=row_in_use[:, None] & channel_in_use[None, :], other=0.0).to(tl.float32)
    query *= scale * LOG2_E
    tail_ptr += matrix * tail_capacity * HEAD_DIM
    num_behind = tl.zeros([BLOCK_W], tl.int32)
    for first in range(num_slots, length, BLOCK_W):
        positions = first + tl.arange(0, BLOCK_W)
        allowed = allowed_tokens(positions, length, mask_ptr, mask_stride_t, first_real)
        num_behind += allowed.to(tl.int32)
        places = positions - num_slots
        is_stored = allowed & (places < num_tail)
        key_ptrs = tail_ptr + places[:, None] * HEAD_DIM + channels[None, :]
        keys = tl.load(key_ptrs, mask=is_stored[:, None] & channel_in_use[None, :], other=0.0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * keys[None, :, :], axis=2)
        scores = tl.where(row_in_use[:, None] & is_stored[None, :], scores, float("-inf"))
        _, _, maximum, total = update_softmax(scores, maximum, total, 1)

    num_allowed = tl.zeros([BLOCK_T], tl.int32)
    for first in range(0, num_slots, BLOCK_T):
        slots = first + tl.arange(0, BLOCK_T)
        allowed = allowed_tokens(slots, num_slots, mask_ptr, mask_stride_t, first_real)
        num_allowed += allowed.to(tl.int32)
        scores = _load_scores(scores_ptr, rows, row_in_use, slots, allowed, num_slots)
        _, _, maximum, total = update_softmax(scores, maximum, total, 1)
    num_tokens = tl.sum(num_behind, axis=0) + tl.sum(num_allowed, axis=0)

    # Weights: a query that may attend to nothing has no maximum to subtract
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0) / num_queries
    least = tl.minimum(min_weight * (1.0 / num_tokens.to(tl.float32)), 2.0)
    num_before = 0
    forced_counts = tl.zeros([BLOCK_T], tl.int32)
    other_counts = tl.zeros([BLOCK_T], tl.int32)
    for first in range(0, num_slots, BLOCK_T):
        slots = first + tl.arange(0, BLOCK_T)
        allowed = allowed_tokens(slots, num_slots, mask_ptr, mask_stride_t, first_real)
        ranks = num_before + tl.cumsum(allowed.to(tl.int32), axis=0)
        num_before += tl.sum(allowed.to(tl.int32), axis=0)
        scores = _load_scores(scores_ptr, rows, row_in_use, slots, allowed, num_slots)
        weights = tl.sum(tl.exp2(scores - reference[:, None]) * inverse[:, None], axis=0)
        is_forced = allowed & ((ranks <= num_first) | (num_tokens - ranks < num_newest))
        is_other = allowed & ~is_forced & (weights >= least)
        forced_counts += is_forced.to(tl.int32)
        other_counts += is_other.to(tl.int32)
        weights = tl.where(is_forced, _FORCED, tl.where(is_other, weights, _NEVER))
        tl.store(weights_ptr + slots, weights, mask=slots < num_slots)
    num_forced, num_others = tl.sum(forced_counts, axis=0), tl.sum(other_counts, axis=0)
    # Rounded down in float64, as Python does
    most = tl.maximum((num_tokens.to(tl.float64) * tl.load(ratio_ptr)).to(tl.int32), 1)
    if wanted_ptr is not None:
        # Wanted tokens, averaged over all queries of the sequence and rounded up
        num_wanted = tl.full([], 0, tl.int64)
        for other in range(0, num_heads):
            num_wanted += tl.load(wanted_ptr + batch * num_heads + other)
        most = tl.minimum(most, tl.cdiv(num_wanted, num_heads * num_queries).to(tl.int32))
    most_others = tl.maximum(most - num_forced, 0)
    count = num_forced + tl.minimum(num_others, most_others)

    # All threads have stored their weights
    tl.debug_barrier()
    bits_ptr = weights_ptr.to(tl.pointer_type(tl.int32))
    # Bits of the smallest weight that is chosen, and how many of those with these bits
    threshold = -1
    num_equal = 0
    if num_others > most_others:
        threshold, num_equal = _find_threshold(bits_ptr, num_slots, count, BLOCK_T)
    num_before = 0
    num_equal_before = 0
    for first in range(0, num_slots, BLOCK_T):
        slots = first + tl.arange(0, BLOCK_T)
        bits = tl.load(bits_ptr + slots, mask=slots < num_slots, other=-2)
        is_equal = bits == threshold
        equal_ranks = num_equal_before + tl.cumsum(is_equal.to(tl.int32), axis=0)
        num_equal_before += tl.sum(is_equal.to(tl.int32), axis=0)
        is_chosen = (bits > threshold) | (is_equal & (equal_ranks <= num_equal))
        places = num_before + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        num_before += tl.sum(is_chosen.to(tl.int32), axis=0)
        tl.store(slots_ptr + places, slots.to(tl.int64), mask=is_chosen & (places < limit))
    # Filling, which is read as slots
    for first in range(count, limit, BLOCK_T):
        places = first + tl.arange(0, BLOCK_T)
        tl.store(slots_ptr + places, tl.zeros([BLOCK_T], tl.int64), mask=places < limit)
    tl.store(count_ptr + matrix, count.to(tl.int64))


@triton.jit
def _find_threshold(bits_ptr, num_slots, count, BLOCK_T: tl.constexpr):
    """Find the `count`-th largest of a head's bits; also return how many of those with its bits are among `count`."""
    digits = tl.arange(0, _BOUNDS)
    threshold = 0
    num_above = 0
    for number in range(0, _NUM_DIGITS):
        shift = tl.maximum(_FIRST_SHIFT - 4 * number, 0)
        bounds = threshold + (digits << shift)
        counts = tl.zeros([BLOCK_T, _BOUNDS], tl.int32)
        for first in range(0, num_slots, BLOCK_T):
            slots = first + tl.arange(0, BLOCK_T)
            bits = tl.load(bits_ptr + slots, mask=slots < num_slots, other=-2)
            counts += (bits[:, None] >= bounds[None, :]).to(tl.int32)
        num_at_least = tl.sum(counts, axis=0)
        # Bounds rise, so that their counts fall; the first is low enough
        digit = tl.sum((num_at_least >= count).to(tl.int32), axis=0) - 1
        threshold += digit << shift
        # Right in the last turn, where bounds are one apart
        num_above = tl.sum(tl.where(digits == digit + 1, num_at_least, 0), axis=0)
    return threshold, count - num_above


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["mask_ptr", "padding_ptr"])
def count_kernel(
    scores_ptr, mask_ptr, mask_stride_b, mask_stride_t, padding_ptr, wanted_ptr, num_heads, num_queries, num_slots,
    distance, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Count the tokens of one head that are at most `distance` below the largest score of their query."""
    matrix = tl.program_id(0).to(tl.int64)
    batch = matrix // num_heads
    if mask_ptr is not None:
        mask_ptr += batch * mask_stride_b
    first_real = first_position(padding_ptr, batch)
    scores_ptr += matrix * num_queries * num_slots
    rows = tl.arange(0, BLOCK_G)
    row_in_use = rows < num_queries
    maxima = tl.full([BLOCK_G, BLOCK_T], float("-inf"), tl.float32)
    for first in range(0, num_slots, BLOCK_T):
        slots = first + tl.arange(0, BLOCK_T)
        allowed = allowed_tokens(slots, num_slots, mask_ptr, mask_stride_t, first_real)
        maxima = tl.maximum(maxima, _load_scores(scores_ptr, rows, row_in_use, slots, allowed, num_slots))
    least = tl.max(maxima, axis=1) - distance * LOG2_E
    counts = tl.zeros([BLOCK_G, BLOCK_T], tl.int32)
    for first in range(0, num_slots, BLOCK_T):
        slots = first + tl.arange(0, BLOCK_T)
        allowed = allowed_tokens(slots, num_slots, mask_ptr, mask_stride_t, first_real)
        scores = _load_scores(scores_ptr, rows, row_in_use, slots, allowed, num_slots)
        counts += ((scores >= least[:, None]) & (scores > float("-inf"))).to(tl.int32)
    tl.store(wanted_ptr + matrix, tl.sum(tl.sum(counts, axis=1), axis=0).to(tl.int64))


def prepare_choice(
    scores: torch.Tensor,
    query: torch.Tensor,
    tail: torch.Tensor,
    num_tail: int,
    length: int,
    limit: int,
    mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    *,
    ratio: torch.Tensor,
    min_weight: float,
    wanted: torch.Tensor | None,
    num_first: int,
    num_newest: int,
    scale: float,
    weights: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
) -> Launch:
    """
    Prepare the launch that chooses slots.

    Args:
        scores (`torch.Tensor` of shape `[B, H, G, N]`, float32): scaled scores of all slots, to the base of 2; slot i
            is position i.
        query (`torch.Tensor` of shape `[B, H * G, 1, D]`): contiguous queries, by which the tail is scored.
        tail (`torch.Tensor` of shape `[B, H, capacity, D]`): keys that follow the pool, `num_tail` in use.
        length (`int`): tokens of the sequence, N + W or one more.
        limit (`int`): slots of a selection, K.
        mask (`torch.Tensor` of shape `[B or 1, length]`, bool, *optional*): True for positions that may be chosen.
        padding (`torch.Tensor` of shape `[B]`, int64, *optional*): tokens at the start of each sequence that may not.
        ratio (`torch.Tensor` of shape `[1]`, float64): share of the sequence's tokens that are chosen at most, unless
            more are forced.
        min_weight (`float`): least weight of tokens that are not forced, in units of the mean; -inf for none.
        wanted (`torch.Tensor` of shape `[B, H]`, int64, *optional*): written by `prepare_count`.
        num_first, num_newest (`int`): first and newest tokens of a sequence that are forced.
        scale (`float`): factor of the scores of the tail.
        weights (`torch.Tensor` of shape `[B, H, N]`, float32): scratch memory.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64), count (`torch.Tensor` of shape `[B, H]`, int64): the
            result; filling is 0.
    """
    batch_size, num_heads, num_queries, num_slots = scores.shape
    head_dim = query.shape[-1]
    block_queries, block_channels = triton.next_power_of_2(num_queries), triton.next_power_of_2(head_dim)
    arguments = {
        "scores_ptr": scores,
        "query_ptr": query,
        "tail_ptr": tail,
        **token_mask_arguments(mask),
        "padding_ptr": padding,
        "ratio_ptr": ratio,
        "wanted_ptr": wanted,
        "weights_ptr": weights,
        "slots_ptr": slots,
        "count_ptr": count,
        "num_heads": num_heads,
        "num_queries": num_queries,
        "num_slots": num_slots,
        "num_tail": num_tail,
        "tail_capacity": tail.shape[2],
        "length": length,
        "limit": limit,
        "num_first": num_first,
        "num_newest": num_newest,
        "min_weight": min_weight,
        "scale": scale,
        "HEAD_DIM": head_dim,
        "BLOCK_G": block_queries,
        "BLOCK_T": _tile_tokens(block_queries),
        "BLOCK_W": max(_TAIL_PRODUCTS // (block_queries * block_channels), 1),
        "BLOCK_D": block_channels,
    }
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    return Launch(choose_kernel, (batch_size * num_heads,), arguments, options, (slots, count))


def prepare_count(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    distance: float,
    wanted: torch.Tensor,
) -> Launch:
    """
    Prepare the launch that counts the tokens of each head whose scores `[B, H, G, N]`, to the base of 2, are at most
    `distance`, to the base of e, below the largest one of their query: `wanted` `[B, H]`, int64, over all queries. See
    `prepare_choice` for the tokens that count.
    """
    batch_size, num_heads, num_queries, num_slots = scores.shape
    block_queries = triton.next_power_of_2(num_queries)
    arguments = {
        "scores_ptr": scores,
        **token_mask_arguments(mask),
        "padding_ptr": padding,
        "wanted_ptr": wanted,
        "num_heads": num_heads,
        "num_queries": num_queries,
        "num_slots": num_slots,
        "distance": distance,
        "BLOCK_G": block_queries,
        "BLOCK_T": _tile_tokens(block_queries),
    }
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
    return Launch(count_kernel, (batch_size * num_heads,), arguments, options, wanted)


def _tile_tokens(block_queries: int) -> int:
    return max(min(_TILE_SCORES // block_queries, _MAX_TILE_TOKENS), 1)
