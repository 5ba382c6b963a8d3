"""The outliers of a tile, added without atomics, so that results are the same from run to run.

Query (or probabilities) are gathered at `BLOCK_E` entries at once, and scattered to tokens (or channels) by a dot with
a one-hot matrix. Legend as in `attend.py`; all pointers are those of one chunk.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_exact


@triton.jit
def load_entries(
    index_ptr, value_ptr, first_entry, last_entry, first_token, CHANNEL_BITS: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Token within the tile at `first_token` (out of range for another tile's), channel and value of some outliers."""
    entries = first_entry + tl.arange(0, BLOCK_E)
    in_use = entries < last_entry
    index = tl.load(index_ptr + entries, mask=in_use, other=0).to(tl.int32)
    values = tl.load(value_ptr + entries, mask=in_use, other=0.0).to(tl.float32)
    # Outliers come in tiles of 64 tokens, of which this tile may be a part
    return (index >> CHANNEL_BITS) - first_token % 64, index & ((1 << CHANNEL_BITS) - 1), values


@triton.jit
def score_outliers(
    query_rows_ptr,
    row_in_use,
    index_ptr,
    value_ptr,
    first_entry,
    last_entry,
    first_token,
    CHANNEL_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What the entries add to `query keys^T` `[rows, tokens]`."""
    scores = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for entry in range(first_entry, last_entry, BLOCK_E):
        # fmt: off
        tokens, channels, values = load_entries(
            index_ptr, value_ptr, entry, last_entry, first_token, CHANNEL_BITS, BLOCK_E)
        # fmt: on
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
    CHANNEL_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`output` `[rows, channels]` with what the entries add to `probabilities values`."""
    for entry in range(first_entry, last_entry, BLOCK_E):
        # fmt: off
        tokens, channels, values = load_entries(
            index_ptr, value_ptr, entry, last_entry, first_token, CHANNEL_BITS, BLOCK_E)
        # fmt: on
        in_tile = (tokens >= 0) & (tokens < BLOCK_T)
        tokens = tl.where(in_tile, tokens, 0)
        values = tl.where(in_tile, values, 0.0)
        gathered = tl.gather(probabilities, tl.broadcast_to(tokens[None, :], [BLOCK_R, BLOCK_E]), axis=1)
        one_hot = (channels[:, None] == tl.arange(0, BLOCK_D)[None, :]).to(tl.float16)
        output += dot_exact(gathered * values[None, :], one_hot, PARTS)
    return output
