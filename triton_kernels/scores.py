"""Scores of all stored keys from their codes: no code is ever written to memory as a float.

A key is `scale * (code - offset)` in every channel, so a score is the product of query and centred codes, times the
token's scale. Plain PyTorch has to make a float32 copy of all codes for it, many times what is stored; here a program
takes a tile of tokens of one head, reads each byte once, and multiplies the codes of all its bit fields with the
queries of the whole group.

Legend: B batch, H key/value heads, G query heads a key/value head, T tokens, D head dim, P bytes a token.
"""

import torch
import triton
import triton.language as tl

from .arithmetic import block_size, dot_exact
from .launch import OPTIONS, tensor_arguments


# Bytes of codes, and numbers of scores, that a program holds at once: what fits into its registers
_BLOCK_BYTES = 8192
_BLOCK_SCORES = 2048
_MAX_BLOCK_TOKENS = 128
_MIN_BLOCK_TOKENS = 32
# Arguments that differ from step to step: kernels for each divisibility would gain nothing, and be compiled amid steps
_NOT_SPECIALIZED = ["num_heads", "num_rows", "length"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _scores_kernel(
    codes_ptr, scale_ptr, query_ptr, scores_ptr, num_heads, num_rows, length, codes_stride_b, codes_stride_h,
    codes_stride_t, scale_stride_b, scale_stride_h, scale_stride_t, query_stride_b, query_stride_h, query_stride_g,
    HEAD_DIM: tl.constexpr, NBITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head; the scores `[B, H, G, T]` are contiguous."""
    FIELDS: tl.constexpr = 8 // NBITS
    WIDTH: tl.constexpr = (HEAD_DIM + FIELDS - 1) // FIELDS
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < length
    rows = tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    places = tl.arange(0, BLOCK_P)
    in_width = places < WIDTH

    codes_ptr += batch * codes_stride_b + head * codes_stride_h
    codes_ptrs = codes_ptr + tokens.to(tl.int64)[:, None] * codes_stride_t + places[None, :]
    packed = tl.load(codes_ptrs, mask=is_token[:, None] & in_width[None, :], other=0)
    query_ptrs = query_ptr + batch * query_stride_b + head * query_stride_h + rows[:, None] * query_stride_g
    scores = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for field in tl.static_range(FIELDS):
        channels = field * WIDTH + places
        is_channel = in_width & (channels < HEAD_DIM)
        query = tl.load(query_ptrs + channels[None, :], mask=is_row[:, None] & is_channel[None, :], other=0.0)
        codes = (packed >> (NBITS * field)) & ((1 << NBITS) - 1)
        # Centred before the product, not after: what would be taken off again is large beside the scores
        centred = codes.to(tl.float16) - (2.0 ** (NBITS - 1) - 0.5)
        scores += dot_exact(query, tl.trans(centred), 2)
    scale_ptrs = scale_ptr + batch * scale_stride_b + head * scale_stride_h + tokens.to(tl.int64) * scale_stride_t
    scores *= tl.load(scale_ptrs, mask=is_token, other=0.0).to(tl.float32)[None, :]
    scores_ptr += (matrix * num_rows + rows.to(tl.int64)[:, None]) * length
    tl.store(scores_ptr + tokens[None, :], scores, mask=is_row[:, None] & is_token[None, :])


def score_codes(codes: torch.Tensor, scale: torch.Tensor, query: torch.Tensor, nbits: int) -> torch.Tensor:
    """
    Products of queries and of the keys that codes stand for.

    Args:
        codes (`torch.Tensor` of shape `[B, H, T, P]`, uint8, its last dimension contiguous): channel `i * P + j`
            stands in bit field `i` (lowest first) of byte `j`.
        scale (`torch.Tensor` of shape `[B, H, T]`, float, any strides): a key is `scale * (code - (2**(nbits - 1) -
            0.5))`.
        query (`torch.Tensor` of shape `[B, H, G, D]`, float32): the queries of each head's group; `P = ceil(D * nbits
            / 8)`.
        nbits (`int`): 2, 4 or 8.

    Returns:
        `torch.Tensor` of shape `[B, H, G, T]`, float32.
    """
    batch_size, num_heads, num_rows, head_dim = query.shape
    length, num_bytes = codes.shape[2:]
    assert num_bytes == -(-head_dim * nbits // 8) and codes.stride(3) == 1 and query.dtype == torch.float32
    query = query if query.stride(3) == 1 else query.contiguous()
    scores = query.new_empty(batch_size, num_heads, num_rows, length)
    if scores.numel() == 0:
        return scores
    block_bytes, block_rows = block_size(num_bytes), block_size(num_rows)
    fitting = min(_BLOCK_BYTES // block_bytes, _BLOCK_SCORES // block_rows, _MAX_BLOCK_TOKENS)
    # Of a group of 64 tokens half a tile would be empty
    fitting = min(fitting, triton.next_power_of_2(length))
    block_tokens = max(fitting, _MIN_BLOCK_TOKENS)
    _scores_kernel[(batch_size * num_heads, triton.cdiv(length, block_tokens))](
        **tensor_arguments("codes", codes, "bht"),
        **tensor_arguments("scale", scale, "bht"),
        **tensor_arguments("query", query, "bhg"),
        scores_ptr=scores,
        num_heads=num_heads,
        num_rows=num_rows,
        length=length,
        HEAD_DIM=head_dim,
        NBITS=nbits,
        BLOCK_R=block_rows,
        BLOCK_T=block_tokens,
        BLOCK_P=block_bytes,
        **OPTIONS,
    )
    return scores
