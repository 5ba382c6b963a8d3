"""Scores of all stored keys from their codes: no code is ever written to memory as a float.

A key is `scale * (code - offset)` in every channel, so a score is the product of query and centred codes, times the
token's scale. Plain PyTorch has to make a float32 copy of all codes for it, many times what is stored; here a program
takes a tile of tokens of one head, reads each byte once, and multiplies the codes of all its bit fields with the
queries of the whole group.

Legend: B batch, H key/value heads, G query heads a key/value head, T tokens, D head dim, P bytes a token.
"""

import math

import torch
import triton
import triton.language as tl

from .arithmetic import block_size, dot_exact, dot_precision
from .launch import OPTIONS, Launch, tensor_arguments


# Bytes of codes, and numbers of scores, that a program holds at once: what fits into its registers
_BLOCK_BYTES = 8192
_BLOCK_SCORES = 2048
_MAX_BLOCK_TOKENS = 128
_MIN_BLOCK_TOKENS = 32
# Tokens of a tile of columns, and of one in float32
_COLUMN_TOKENS, _COLUMN_TOKENS_FLOAT32 = 64, 32
# Arguments that differ from step to step: kernels for each divisibility would gain nothing, and be compiled amid steps
_NOT_SPECIALIZED = [
    "num_heads",
    "num_rows",
    "length",
    *(f"{name}_stride_{dimension}" for name in ("codes", "scale", "columns") for dimension in "bh"),
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _scores_kernel(
    codes_ptr, scale_ptr, query_ptr, spread_ptr, scores_ptr, num_heads, num_rows, length, factor, codes_stride_b,
    codes_stride_h, codes_stride_t, scale_stride_b, scale_stride_h, scale_stride_t, query_stride_b, query_stride_h,
    query_stride_g, HEAD_DIM: tl.constexpr, NBITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of one head; the scores `[B, H, G, T]` are contiguous."""
    FIELDS: tl.constexpr = 8 // NBITS
    WIDTH: tl.constexpr = (HEAD_DIM + FIELDS - 1) // FIELDS
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    rows = tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    places = tl.arange(0, BLOCK_P)
    in_width = places < WIDTH
    codes_ptr += tl.multiple_of(batch * codes_stride_b + head * codes_stride_h, ALIGNMENT)
    scale_ptr += batch * scale_stride_b + head * scale_stride_h
    query_ptrs = query_ptr + batch * query_stride_b + head * query_stride_h + rows[:, None] * query_stride_g
    scores_ptr += (matrix * num_rows + rows.to(tl.int64)[:, None]) * length
    for first in range(tl.program_id(1) * BLOCK_T, length, tl.num_programs(1) * BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        is_token = tokens < length
        codes_ptrs = codes_ptr + tokens.to(tl.int64)[:, None] * codes_stride_t + places[None, :]
        packed = tl.load(codes_ptrs, mask=is_token[:, None] & in_width[None, :], other=0)
        scores = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
        for field in tl.static_range(FIELDS):
            channels = field * WIDTH + places
            is_channel = in_width & (channels < HEAD_DIM)
            query = tl.load(query_ptrs + channels[None, :], mask=is_row[:, None] & is_channel[None, :], other=0.0)
            query = query.to(tl.float32)
            if spread_ptr is not None:
                query *= tl.load(spread_ptr + matrix * HEAD_DIM + channels, mask=is_channel, other=0.0)[None, :]
            codes = (packed >> (NBITS * field)) & ((1 << NBITS) - 1)
            # Centred before the product, not after: what would be taken off again is large beside the scores
            centred = codes.to(tl.float16) - (2.0 ** (NBITS - 1) - 0.5)
            scores += dot_exact(query, tl.trans(centred), 2)
        scales = tl.load(scale_ptr + tokens.to(tl.int64) * scale_stride_t, mask=is_token, other=0.0).to(tl.float32)
        scores *= scales[None, :] * factor
        tl.store(scores_ptr + tokens[None, :], scores, mask=is_row[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def score_columns_kernel(
    columns_ptr, rotation_ptr, query_ptr, scores_ptr, num_heads, num_rows, length, factor, columns_stride_b,
    columns_stride_h, HEAD_DIM: tl.constexpr, NUM_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Some tiles of tokens of one head; the scores `[B, H, G, T]` and queries `[B, H, G, D]` are contiguous."""
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    rows, channels, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    is_row, is_channel, is_column = rows < num_rows, channels < HEAD_DIM, columns < NUM_COLUMNS
    query_ptrs = query_ptr + (matrix * num_rows + rows[:, None]) * HEAD_DIM + channels[None, :]
    query = tl.load(query_ptrs, mask=is_row[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
    rotation_ptrs = rotation_ptr + (matrix * HEAD_DIM + channels[:, None]) * NUM_COLUMNS + columns[None, :]
    rotation = tl.load(rotation_ptrs, mask=is_channel[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    query = tl.dot(query, rotation, input_precision=PRECISION) * factor
    columns_ptr += batch * columns_stride_b + head * columns_stride_h
    scores_ptr += (matrix * num_rows + rows.to(tl.int64)[:, None]) * length
    for first in range(tl.program_id(1) * BLOCK_T, length, tl.num_programs(1) * BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        is_token = tokens < length
        key_ptrs = columns_ptr + tokens.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        keys = tl.load(key_ptrs, mask=is_token[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        # A rotated query is float32 whatever the dtype of columns is
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3" if PRECISION == "tf32" else PRECISION)
        tl.store(scores_ptr + tokens[None, :], scores, mask=is_row[:, None] & is_token[None, :])


def prepare_code_scores(
    query: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    nbits: int,
    spread: torch.Tensor | None = None,
    factor: float = 1.0,
    most_programs: int | None = None,
) -> Launch:
    """
    Prepare products of queries and of the keys that codes stand for, `[B, H, G, T]`, float32.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`, its last dimension contiguous): the queries of each head's
            group; `P = ceil(D * nbits / 8)`.
        codes (`torch.Tensor` of shape `[B, H, T, P]`, uint8, its last dimension contiguous): channel `i * P + j`
            stands in bit field `i` (lowest first) of byte `j`.
        scale (`torch.Tensor` of shape `[B, H, T]`, float, any strides): a key is `scale * (code - (2**(nbits - 1) -
            0.5))`, times the spread.
        nbits (`int`): 2, 4 or 8.
        spread (`torch.Tensor` of shape `[B, H, D]`, float32, contiguous, *optional*): factors of channels.
        factor (`float`): factor of all products.
        most_programs (`int`, *optional*): programs of the launch, if these are to be the same for more tokens.
    """
    batch_size, num_heads, num_rows, head_dim = query.shape
    length, num_bytes = codes.shape[2:]
    assert num_bytes == -(-head_dim * nbits // 8) and codes.stride(3) == 1 and query.stride(3) == 1
    assert not any(codes.stride(dimension) % num_bytes for dimension in range(3)), "codes lie row behind row"
    scores = query.new_empty(batch_size, num_heads, num_rows, length, dtype=torch.float32)
    block_bytes, block_rows = block_size(num_bytes), block_size(num_rows)
    fitting = min(_BLOCK_BYTES // block_bytes, _BLOCK_SCORES // block_rows, _MAX_BLOCK_TOKENS)
    # Of a group of 64 tokens half a tile would be empty
    fitting = min(fitting, triton.next_power_of_2(max(length, 1)))
    block_tokens = max(fitting, _MIN_BLOCK_TOKENS)
    arguments = {
        **tensor_arguments("codes", codes, "bht"),
        **tensor_arguments("scale", scale, "bht"),
        **tensor_arguments("query", query, "bhg"),
        "spread_ptr": spread,
        "scores_ptr": scores,
        "num_heads": num_heads,
        "num_rows": num_rows,
        "length": length,
        "factor": factor,
        "HEAD_DIM": head_dim,
        "NBITS": nbits,
        "BLOCK_R": block_rows,
        "BLOCK_T": block_tokens,
        "BLOCK_P": block_bytes,
        # Heads begin at whole rows of bytes, however many rows there are room for
        "ALIGNMENT": math.gcd(num_bytes, 16),
    }
    grid = _grid(scores, block_tokens, most_programs)
    return Launch(_scores_kernel, grid, arguments, OPTIONS, scores)


def prepare_column_scores(
    query: torch.Tensor,
    columns: torch.Tensor,
    length: int,
    rotation: torch.Tensor,
    factor: float = 1.0,
    most_programs: int | None = None,
) -> Launch:
    """
    Prepare products of rotated queries and of columns of keys, `[B, H, G, T]`, float32.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`, contiguous): the queries.
        columns (`torch.Tensor` of shape `[B, H, at least T, C]`, contiguous): columns of rotated keys, T of them
            (`length`) in use.
        rotation (`torch.Tensor` of shape `[B, H, D, C]`, contiguous): what queries are multiplied with.
        factor, most_programs: as in `prepare_code_scores`.
    """
    batch_size, num_heads, num_rows, head_dim = query.shape
    num_columns = columns.shape[3]
    is_float32 = columns.dtype == torch.float32
    block_tokens = _COLUMN_TOKENS_FLOAT32 if is_float32 else _COLUMN_TOKENS
    scores = query.new_empty(batch_size, num_heads, num_rows, length, dtype=torch.float32)
    arguments = {
        **tensor_arguments("columns", columns, "bh"),
        "rotation_ptr": rotation,
        "query_ptr": query,
        "scores_ptr": scores,
        "num_heads": num_heads,
        "num_rows": num_rows,
        "length": length,
        "factor": factor,
        "HEAD_DIM": head_dim,
        "NUM_COLUMNS": num_columns,
        "PRECISION": dot_precision(columns.dtype),
        "BLOCK_R": block_size(num_rows),
        "BLOCK_T": block_tokens,
        "BLOCK_D": block_size(head_dim),
        "BLOCK_C": block_size(num_columns),
    }
    grid = _grid(scores, block_tokens, most_programs)
    options = {"num_stages": 1, "num_warps": 8 if is_float32 else 4}
    return Launch(score_columns_kernel, grid, arguments, options, scores)


def _grid(scores: torch.Tensor, block_tokens: int, most_programs: int | None) -> tuple[int, int]:
    batch_size, num_heads, _, length = scores.shape
    num_tiles = triton.cdiv(length, block_tokens)
    if most_programs is not None:
        num_tiles = max(most_programs // (batch_size * num_heads), 1)
    return batch_size * num_heads, num_tiles


def score_codes(codes: torch.Tensor, scale: torch.Tensor, query: torch.Tensor, nbits: int) -> torch.Tensor:
    """Multiply queries with the keys that codes stand for; see `prepare_code_scores`."""
    query = query if query.stride(3) == 1 else query.contiguous()
    scores: torch.Tensor = prepare_code_scores(query, codes, scale, nbits)()
    return scores
