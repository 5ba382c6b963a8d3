"""What is missing at the outliers of a chunk, sorted by tiles of tokens and by head, in one launch.

A library's way is a stable sort, a count, a sum and a gather for each tensor, a launch or several each. Here a program
has one slot (a tile of one head): it counts the outliers of the slots before it, which says where its own begin, and
puts its own there in the order in which they come. So nothing depends on the order of atomic additions, and the result
is a stable sort's. The work is slots times outliers, which is little for the chunks of decoding and short prompts.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, K outliers a channel or token, R rank.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from .outliers import everything


# Every program reads all outliers of its chunk: of more, sorting is less work
MAX_OUTLIERS = 2**16
_BLOCK = 1024


@triton.jit
def _load_places(
    entries,
    indices_ptr,
    used_ptr,
    num_entries,
    num_slots,
    num_heads,
    num_y,
    num_z,
    indices_stride_x,
    indices_stride_y,
    indices_stride_z,
    used_stride_y,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Heads, tokens, channels and slots of entries; what is not in use has the slot behind the last."""
    in_use = entries < num_entries
    x, y, z = entries // (num_y * num_z), entries // num_z % num_y, entries % num_z
    offsets = x.to(tl.int64) * indices_stride_x + y * indices_stride_y + z * indices_stride_z
    index = tl.load(indices_ptr + offsets, mask=in_use, other=0).to(tl.int32)
    in_use = tl.load(used_ptr + y * used_stride_y, mask=in_use, other=0) != 0
    if BY_CHANNEL:
        heads, tokens, channels = x, index, z
    else:
        heads, tokens, channels = index // HEAD_DIM, y, index % HEAD_DIM
    return heads, tokens, channels, tl.where(in_use, tokens // TILE * num_heads + heads, num_slots)


# What differs from prompt to prompt: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "num_chunks",
    "chunk_length",
    "num_low_rank_tokens",
    "rank",
    "num_entries",
    "num_y",
    "num_z",
    *(f"indices_stride_{dimension}" for dimension in "bxmyz"),
    *(f"used_stride_{dimension}" for dimension in "bmy"),
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _store_outliers_kernel(
    missing_ptr,
    indices_ptr,
    used_ptr,
    a_ptr,
    b_ptr,
    stored_indices_ptr,
    stored_values_ptr,
    offsets_ptr,
    exceeded_ptr,
    num_heads,
    num_chunks,
    chunk_length,
    num_low_rank_tokens,
    rank,
    num_entries,
    num_y,
    num_z,
    indices_stride_b,
    indices_stride_x,
    indices_stride_m,
    indices_stride_y,
    indices_stride_z,
    used_stride_b,
    used_stride_m,
    used_stride_y,
    HEAD_DIM: tl.constexpr,
    HAS_LOW_RANK: tl.constexpr,
    TILE: tl.constexpr,
    CHANNEL_BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot of a chunk. What is missing, factors and results are contiguous."""
    slot = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    num_slots = tl.num_programs(0)
    indices_ptr += batch * indices_stride_b + chunk * indices_stride_m
    used_ptr += batch * used_stride_b + chunk * used_stride_m
    chunk_index = batch * num_chunks + chunk
    stored_indices_ptr += chunk_index * num_entries
    stored_values_ptr += chunk_index * num_entries
    offsets_ptr += chunk_index * (num_slots + 1)
    before = 0
    for start in range(0, num_entries, BLOCK):
        # fmt: off
        _, _, _, slots = _load_places(
            start + tl.arange(0, BLOCK), indices_ptr, used_ptr, num_entries, num_slots, num_heads, num_y, num_z,
            indices_stride_x, indices_stride_y, indices_stride_z, used_stride_y, HEAD_DIM, TILE, BY_CHANNEL)
        # fmt: on
        before += tl.sum((slots < slot).to(tl.int32), axis=0)
    tl.store(offsets_ptr + slot, before)
    first_low_rank_token = chunk_length - num_low_rank_tokens
    for start in range(0, num_entries, BLOCK):
        # fmt: off
        heads, tokens, channels, slots = _load_places(
            start + tl.arange(0, BLOCK), indices_ptr, used_ptr, num_entries, num_slots, num_heads, num_y, num_z,
            indices_stride_x, indices_stride_y, indices_stride_z, used_stride_y, HEAD_DIM, TILE, BY_CHANNEL)
        # fmt: on
        is_own = slots == slot
        matrices = (batch * num_heads + heads) * num_chunks + chunk
        missing_offsets = (matrices * chunk_length + tokens) * HEAD_DIM + channels
        values = tl.load(missing_ptr + missing_offsets, mask=is_own, other=0.0)
        if HAS_LOW_RANK:
            has_low_rank = is_own & (tokens >= first_low_rank_token)
            a_ptrs = a_ptr + (matrices * num_low_rank_tokens + tokens - first_low_rank_token) * rank
            b_ptrs = b_ptr + (matrices * HEAD_DIM + channels) * rank
            for column in range(rank):
                a = tl.load(a_ptrs + column, mask=has_low_rank, other=0.0).to(tl.float32)
                b = tl.load(b_ptrs + column, mask=has_low_rank, other=0.0).to(tl.float32)
                values -= a * b
        rounded = values.to(tl.float16)
        poison = rounded.to(tl.float32) * 0.0
        tl.store(exceeded_ptr, 1, mask=tl.max((poison != poison).to(tl.int32), axis=0) > 0)
        own = is_own.to(tl.int32)
        positions = before + tl.cumsum(own, axis=0) - 1
        before += tl.sum(own, axis=0)
        stored_index = (tokens % TILE << CHANNEL_BITS) + channels
        index_type: tl.constexpr = stored_indices_ptr.dtype.element_ty
        tl.store(stored_indices_ptr + positions, stored_index.to(index_type), mask=is_own)
        tl.store(stored_values_ptr + positions, rounded, mask=is_own)
    if slot == num_slots - 1:
        tl.store(offsets_ptr + num_slots, before)
        for start in range(0, num_entries, BLOCK):
            positions = start + tl.arange(0, BLOCK)
            is_spare = (positions >= before) & (positions < num_entries)
            tl.store(stored_indices_ptr + positions, 0, mask=is_spare)
            tl.store(stored_values_ptr + positions, 0.0, mask=is_spare)


def store_outliers(
    missing: torch.Tensor,
    indices: torch.Tensor,
    used: torch.Tensor | None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None,
    exceeded: torch.Tensor,
    tile: int,
    channel_bits: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Sorts outliers by tiles of tokens and by head, with what is missing at each after codes and low rank.

    Args:
        missing (`torch.Tensor` of shape `[B, H, M, L, D]`, float32, contiguous):
            What the codes miss.
        indices (`torch.Tensor`, integer, any strides):
            Tokens `[B, H, M, K, D]`, or channels of all heads `[B, M, L, K]`; at most `MAX_OUTLIERS` a chunk.
        used (`torch.Tensor` broadcastable to `[B, M, K]` or `[B, M, L]`, bool, *optional*):
            Which of them count.
        low_rank (`tuple` of `torch.Tensor` of shapes `[B, H, M, last tokens, R]` and `[B, H, M, D, R]`, *optional*):
            Contiguous factors of a correction of a chunk's last tokens.
        exceeded (`torch.Tensor` of shape `[1]`, int32):
            Set to 1 if a value does not fit float16.
        tile (`int`):
            Tokens a tile.
        channel_bits (`int`):
            How far the token within its tile is shifted in a stored index; the channel stands in the bits below.
        dtype (`torch.dtype`):
            Of the stored indices.

    Returns:
        Indices and values (float16) `[B, 1, M, N]`, and offsets (int32) `[B, 1, M, tiles * H + 1]`: the outliers of
        tile `t` and head `h` are those from `offsets[t * H + h]` on, in the order in which they were given. Entries
        that do not count stand behind the last offset and are 0.
    """
    batch_size, num_heads, num_chunks, chunk_length, head_dim = missing.shape
    by_channel = indices.dim() == 5
    if not by_channel:
        indices = indices.unsqueeze(1)
    num_x, _, num_y, num_z = indices.shape[1:]
    num_entries, num_slots = num_x * num_y * num_z, -(-chunk_length // tile) * num_heads
    assert num_entries <= MAX_OUTLIERS and missing.is_contiguous()
    stored_indices = indices.new_empty(batch_size, 1, num_chunks, num_entries, dtype=dtype)
    stored_values = missing.new_empty(batch_size, 1, num_chunks, num_entries, dtype=torch.float16)
    offsets = indices.new_empty(batch_size, 1, num_chunks, num_slots + 1, dtype=torch.int32)
    if stored_indices.numel() == 0:
        return stored_indices, stored_values, offsets.zero_()
    # The same kernel whether something is padded or not
    used = (everything(missing.device) if used is None else used).expand(batch_size, num_chunks, num_y)
    a, b = low_rank or (None, None)
    _store_outliers_kernel[(num_slots, num_chunks, batch_size)](
        missing,
        indices,
        used,
        a,
        b,
        stored_indices,
        stored_values,
        offsets,
        exceeded,
        num_heads,
        num_chunks,
        chunk_length,
        *((0, 0) if a is None else a.shape[3:]),
        num_entries,
        num_y,
        num_z,
        *indices.stride(),
        *used.stride(),
        HEAD_DIM=head_dim,
        HAS_LOW_RANK=a is not None,
        TILE=tile,
        CHANNEL_BITS=channel_bits,
        BY_CHANNEL=by_channel,
        BLOCK=_BLOCK,
    )
    return stored_indices, stored_values, offsets
