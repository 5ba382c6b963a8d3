"""The steps of the attention kernels: codes, low rank, outliers, masks, the online softmax, exact parts, merging.

Legend as in `attention.py`; a tile is `[BLOCK_T tokens, BLOCK_D channels]` of one chunk and head, and all pointers are
those of that chunk and head.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def dot_exact(left, right, PARTS: tl.constexpr):
    """
    The product of float32 `[rows, K]` and what float16 holds exactly `[K, N]`: codes, factors, one-hot matrices.

    Rows are first scaled to at most 1, so that nothing overflows and what underflows is far below the row's largest.
    A row below 1e-30 throughout counts as zero: the factor that scales it might be infinite.
    One part (11 bits) is as precise as TF32 and takes half its registers and tensor core steps; two are near float32.
    """
    largest = tl.max(tl.abs(left), axis=1)
    left *= tl.where(largest > 1e-30, 1.0 / largest, 0.0)[:, None]
    part = left.to(tl.float16)
    product = tl.dot(part, right)
    for _ in tl.static_range(1, PARTS):
        left -= part.to(tl.float32)
        part = left.to(tl.float16)
        product = tl.dot(part, right, product)
    return product * largest[:, None]


@triton.jit
def load_codes(
    codes_ptr,
    STRIDE: tl.constexpr,
    channels,
    in_use,
    HEAD_DIM: tl.constexpr,
    NBITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Codes `[tokens, channels]` in float16, of the tile that begins at `codes_ptr`."""
    rows_ptr = codes_ptr + tl.arange(0, BLOCK_T)[:, None] * STRIDE
    channels = channels[None, :]
    if NBITS == 3:
        # Two planes: two low bits, then the high bit
        LOW_WIDTH: tl.constexpr = (HEAD_DIM + 3) // 4
        HIGH_WIDTH: tl.constexpr = (HEAD_DIM + 7) // 8
        low = tl.load(rows_ptr + channels % LOW_WIDTH, mask=in_use, other=0).to(tl.int32)
        high = tl.load(rows_ptr + (LOW_WIDTH + channels % HIGH_WIDTH), mask=in_use, other=0).to(tl.int32)
        codes = ((low >> (channels // LOW_WIDTH * 2)) & 3) | (((high >> (channels // HIGH_WIDTH)) & 1) << 2)
    elif NBITS == 8:
        codes = tl.load(rows_ptr + channels, mask=in_use, other=0).to(tl.int32)
    else:
        # A byte is read once for each of its channels: the cache next to the registers answers all but the first
        WIDTH: tl.constexpr = (HEAD_DIM * NBITS + 7) // 8
        packed = tl.load(rows_ptr + channels % WIDTH, mask=in_use, other=0).to(tl.int32)
        codes = (packed >> (channels // WIDTH * NBITS)) & ((1 << NBITS) - 1)
    return codes.to(tl.float16)


@triton.jit
def mask_scores(scores, mask_ptr, in_use, MASK: tl.constexpr):
    """Applies a mask (1: nonzero attends, 2: added to the natural scores) to scores in base 2."""
    if MASK == 1:
        allowed = tl.load(mask_ptr, mask=in_use, other=0)
        scores = tl.where(allowed != 0, scores, float("-inf"))
    elif MASK == 2:
        bias = tl.load(mask_ptr, mask=in_use, other=0.0).to(tl.float32)
        # The lowest float32, which Transformers masks with, must stay finite: such rows attend uniformly, as elsewhere
        scaled = tl.maximum(bias * 1.4426950408889634, -3.0e38)
        scores += tl.where(bias == float("-inf"), float("-inf"), scaled)
    return tl.where(in_use, scores, float("-inf"))


@triton.jit
def update_softmax(scores, maximum, total):
    """One step of the online softmax in base 2: probabilities, decay of what was summed so far, maximum, total."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # A row that may attend to nothing so far has no maximum to subtract
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    probabilities = tl.exp2(scores - reference[:, None])
    decay = tl.exp2(maximum - reference)
    return probabilities, decay, new_maximum, total * decay + tl.sum(probabilities, axis=1)


@triton.jit
def load_groups(
    scale_ptr,
    zero_ptr,
    STRIDE: tl.constexpr,
    first_token,
    token_in_use,
    channels,
    channel_in_use,
    tokens_per_group,
    CHANNELS_PER_GROUP: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Scale and zero of a tile in float32: `[channels]` (fold 0), `[tokens]` (1) or `[tokens, channels]` (2, 3)."""
    tokens = tl.arange(0, BLOCK_T)
    if FOLD == 0:
        base = tl.cast(first_token // tokens_per_group, tl.int64) * STRIDE
        offsets = channels
        in_use = channel_in_use
    elif FOLD == 1:
        base = tl.cast(first_token, tl.int64) * STRIDE
        offsets = tokens * STRIDE
        in_use = token_in_use
    else:
        if FOLD == 2:
            base = tl.cast(first_token, tl.int64) * STRIDE
            offsets = tokens[:, None] * STRIDE + (channels // CHANNELS_PER_GROUP)[None, :]
        else:
            base = tl.cast(first_token // tokens_per_group, tl.int64) * STRIDE
            groups = (first_token % tokens_per_group + tokens) // tokens_per_group
            offsets = groups[:, None] * STRIDE + channels[None, :]
        in_use = token_in_use[:, None] & channel_in_use[None, :]
    scale = tl.load(scale_ptr + base + offsets, mask=in_use, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + base + offsets, mask=in_use, other=0.0).to(tl.float32)
    return scale, zero


@triton.jit
def score_codes(
    query,
    query_sum,
    codes,
    scale,
    zero,
    FOLD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`query keys^T` `[rows, tokens]`, with keys `zero + scale * code`."""
    if FOLD == 0:
        scores = dot_exact(query * scale[None, :], tl.trans(codes), PARTS)
        scores += tl.sum(query * zero[None, :], axis=1)[:, None]
    elif FOLD == 1:
        scores = dot_exact(query, tl.trans(codes), PARTS)
        scores = scores * scale[None, :] + query_sum[:, None] * zero[None, :]
    else:
        keys = codes.to(tl.float32) * scale + zero
        if PARTS == 1:
            scores = dot_exact(query, tl.trans(keys.to(tl.float16)), PARTS)
        else:
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    return scores


@triton.jit
def weigh_codes(probabilities, codes, scale, zero, FOLD: tl.constexpr, PARTS: tl.constexpr):
    """`probabilities values` `[rows, channels]`, with values `zero + scale * code`."""
    if FOLD == 0:
        output = dot_exact(probabilities, codes, PARTS) * scale[None, :]
        output += tl.sum(probabilities, axis=1)[:, None] * zero[None, :]
    elif FOLD == 1:
        output = dot_exact(probabilities * scale[None, :], codes, PARTS)
        output += tl.sum(probabilities * zero[None, :], axis=1)[:, None]
    else:
        values = codes.to(tl.float32) * scale + zero
        if PARTS == 1:
            output = dot_exact(probabilities, values.to(tl.float16), PARTS)
        else:
            output = tl.dot(probabilities, values, input_precision="ieee")
    return output


@triton.jit
def load_basis(
    factor_ptr, STRIDE: tl.constexpr, channels, channel_in_use, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr
):
    """The factor `B` `[channels, ranks]` of a chunk."""
    ranks = tl.arange(0, BLOCK_RANK)
    return tl.load(
        factor_ptr + channels[:, None] * STRIDE + ranks[None, :],
        mask=channel_in_use[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )


@triton.jit
def load_coefficients(
    factor_ptr,
    STRIDE: tl.constexpr,
    first_token,
    token_in_use,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """The factor `A` `[tokens, ranks]` of a tile; zero for tokens before 0, where the low-rank part begins."""
    tokens = tl.arange(0, BLOCK_T)
    ranks = tl.arange(0, BLOCK_RANK)
    return tl.load(
        factor_ptr + tl.cast(first_token, tl.int64) * STRIDE + (tokens[:, None] * STRIDE + ranks[None, :]),
        mask=(token_in_use & (first_token + tokens >= 0))[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )


@triton.jit
def load_entries(
    index_ptr, value_ptr, first_entry, last_entry, first_token, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Token within the tile at `first_token` (out of range for another tile's), channel and value of some outliers."""
    entries = first_entry + tl.arange(0, BLOCK_E)
    in_use = entries < last_entry
    index = tl.load(index_ptr + entries, mask=in_use, other=0).to(tl.int32)
    values = tl.load(value_ptr + entries, mask=in_use, other=0.0).to(tl.float32)
    # Outliers come in tiles of 64 tokens, of which this tile may be a part
    return index // BLOCK_D - first_token % 64, index % BLOCK_D, values


@triton.jit
def score_outliers(
    query_rows_ptr,
    row_in_use,
    index_ptr,
    value_ptr,
    first_entry,
    last_entry,
    first_token,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What the entries add to `query keys^T` `[rows, tokens]`."""
    scores = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for entry in range(first_entry, last_entry, BLOCK_E):
        tokens, channels, values = load_entries(index_ptr, value_ptr, entry, last_entry, first_token, BLOCK_E, BLOCK_D)
        gathered = tl.load(query_rows_ptr[:, None] + channels[None, :], mask=row_in_use[:, None], other=0.0)
        one_hot = (tokens[:, None] == tl.arange(0, BLOCK_T)[None, :]).to(tl.float16)
        scores += dot_exact(gathered.to(tl.float32) * values[None, :], one_hot, PARTS)
    return scores


@triton.jit
def weigh_outliers(
    output,
    probabilities,
    index_ptr,
    value_ptr,
    first_entry,
    last_entry,
    first_token,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`output` `[rows, channels]` with what the entries add to `probabilities values`."""
    for entry in range(first_entry, last_entry, BLOCK_E):
        tokens, channels, values = load_entries(index_ptr, value_ptr, entry, last_entry, first_token, BLOCK_E, BLOCK_D)
        in_tile = (tokens >= 0) & (tokens < BLOCK_T)
        tokens = tl.where(in_tile, tokens, 0)
        values = tl.where(in_tile, values, 0.0)
        gathered = tl.gather(probabilities, tl.broadcast_to(tokens[None, :], [BLOCK_R, BLOCK_E]), axis=1)
        one_hot = (channels[:, None] == tl.arange(0, BLOCK_D)[None, :]).to(tl.float16)
        output += dot_exact(gathered * values[None, :], one_hot, PARTS)
    return output


@triton.jit
def attend_part(
    output,
    maximum,
    total,
    query,
    row_in_use,
    first_channel,
    num_rows,
    keys_ptr,
    keys_stride_b,
    keys_stride_h,
    keys_stride_t,
    values_ptr,
    values_stride_b,
    values_stride_h,
    values_stride_t,
    mask_ptr,
    mask_stride_b,
    mask_stride_h,
    mask_stride_q,
    mask_stride_t,
    num_queries,
    num_tokens,
    batch,
    head,
    scale_base_2,
    MASK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Carries output, maximum and total of the online softmax on through one exact part."""
    rows = tl.arange(0, BLOCK_R)
    key_channels = tl.arange(0, BLOCK_K)
    value_channels = first_channel + tl.arange(0, BLOCK_V)
    keys_ptr += batch * keys_stride_b + head * keys_stride_h
    values_ptr += batch * values_stride_b + head * values_stride_h
    for first_token in range(0, num_tokens, BLOCK_T):
        tokens = first_token + tl.arange(0, BLOCK_T)
        token_in_use = tokens < num_tokens
        tokens = tl.cast(tokens, tl.int64)
        keys = tl.load(
            keys_ptr + tokens[:, None] * keys_stride_t + key_channels[None, :],
            mask=token_in_use[:, None] & (key_channels < KEY_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_base_2
        tile_mask_ptr = mask_ptr
        if MASK:
            query_head = head * (num_rows // num_queries) + rows // num_queries
            mask_rows = batch * mask_stride_b + query_head * mask_stride_h + rows % num_queries * mask_stride_q
            tile_mask_ptr = mask_ptr + mask_rows[:, None] + tokens[None, :] * mask_stride_t
        scores = mask_scores(scores, tile_mask_ptr, row_in_use[:, None] & token_in_use[None, :], MASK)
        probabilities, decay, maximum, total = update_softmax(scores, maximum, total)
        values = tl.load(
            values_ptr + tokens[:, None] * values_stride_t + value_channels[None, :],
            mask=token_in_use[:, None] & (value_channels < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        output = output * decay[:, None] + tl.dot(probabilities, values, input_precision=PRECISION)
    return output, maximum, total


@triton.jit
def merge_splits(
    output,
    maximum,
    total,
    output_ptr,
    maximum_ptr,
    total_ptr,
    num_splits,
    num_rows,
    first_channel,
    VALUE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Carries output, maximum and total of the online softmax on through the splits of one compressed block."""
    rows = tl.arange(0, BLOCK_R)
    value_channels = first_channel + tl.arange(0, BLOCK_V)
    first_split = tl.program_id(0).to(tl.int64) * num_splits
    for block in range(0, num_splits, BLOCK_S):
        splits = block + tl.arange(0, BLOCK_S)
        in_use = (splits < num_splits)[:, None] & (rows < num_rows)[None, :]
        offsets = (first_split + splits)[:, None] * num_rows + rows[None, :]
        maxima = tl.load(maximum_ptr + offsets, mask=in_use, other=float("-inf"))
        totals = tl.load(total_ptr + offsets, mask=in_use, other=0.0)
        outputs = tl.load(
            output_ptr + offsets[:, :, None] * VALUE_DIM + value_channels[None, None, :],
            mask=in_use[:, :, None] & (value_channels < VALUE_DIM)[None, None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(maxima - reference[None, :])
        decay = tl.exp2(maximum - reference)
        total = total * decay + tl.sum(totals * weights, axis=0)
        output = output * decay[:, None] + tl.sum(outputs * weights[:, :, None], axis=0)
        maximum = new_maximum
    return output, maximum, total
