"""Decode attention over compressed keys and values: dense keys and values are never written to memory.

A program is one warp. It takes one key/value head, up to 16 query rows and one stretch of the sequence (a split), and
goes through it in tiles of up to 64 tokens that never straddle a chunk. Tokens (channels for the output) are the rows
of tensor cores, queries their columns, of which 8 are enough. So no warp repeats what another does, nothing is
exchanged between warps, and four query heads waste half of what is multiplied, not three quarters.

The parts of a key or value are kept apart for as long as possible, because each part has a cheaper way than to be
added up densely:

- codes: one dot a bit field, with the codes as they are stored (`codes.py`). A scale per channel multiplies the query
  (or the output), a scale per token what a group's channels give (or the probabilities), and the zeros become a
  constant per row;
- low rank: `A (B^T q)` for keys with `B^T q` once a chunk, `B (A^T p)` for values with the product by `B` once a
  chunk;
- outliers: query (or probabilities) gathered at 64 entries at once, and scattered to tokens (or channels) by a dot
  with a one-hot matrix: no atomics, so results are the same from run to run.

The splits' partial results are merged by `combine`. Nothing is tuned while it runs: stages and warps are fixed.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, P bytes a token, G groups, R rank,
N outlier entries a chunk.
"""

import math

import torch
import triton

from ..launch import OPTIONS, Launch, tensor_arguments
from ..stored_format import BIT_PLANES, StoredGroups
from .attend_kernel import attend_kernel
from .layout import has_outliers, join_chunks, side_arguments, tokens_per_group
from .masks import mask_arguments
from .outliers import STORED_TILE, number_table
from .partials import device_num_sms, empty_partials, num_split_tiles


# With 256 an H100 took 24 us over 4096 tokens of `kivi-2bit`, with 128 14, and 6 more to merge the splits
_MIN_TOKENS_PER_SPLIT = 128
_BLOCK_TOKENS = 64
_MIN_BLOCK_TOKENS = 16
_MIN_BLOCK_ROWS = 8
# Rows times channels: what registers hold of the output
_MAX_BLOCK_OUTPUT = 2048
_BLOCK_ENTRIES = 64
# Registers of a warp let so many programs share a multiprocessor
PROGRAMS_PER_SM = 8


def prepare_groups(
    query: torch.Tensor,
    keys: StoredGroups,
    values: StoredGroups,
    *,
    num_chunks: int,
    length: int,
    num_tokens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float,
    packed: bool,
    num_sms: int | None = None,
) -> Launch:
    """
    Prepare the launch that attends to chunks: partial results, to be merged by `combine`.

    Args:
        query (`torch.Tensor` of shape `[B, H, rows, D]`): queries. A row is `query head within the group * query
            tokens + query token`.
        keys, values (`StoredGroups`): what to attend to; the last dimension of every tensor is contiguous.
        num_chunks (`int`): chunks in use; the storage may hold more.
        length (`int`): tokens in use, at most `num_chunks * L`: the last chunk may be cut.
        num_tokens (`torch.Tensor` of shape `[1]`, integer, *optional*): tokens in use where the host does not know
            them, as it replays the launch; the grid is for `length`.
        mask (`torch.Tensor` of shape `[B or 1, H * groups or 1, query tokens or 1, length]`, *optional*): boolean
            (`True` attends) or added to the scores.
        scale (`float`): factor of the scores.
        packed (`bool`): whether codes are masked by an instruction of NVIDIA's GPUs (`has_pairs`).
        num_sms (`int`, *optional*, defaults to the device's): multiprocessors to keep busy, which sets the number of
            splits.
    """
    batch_size, num_heads, num_rows, key_dim = query.shape
    value_dim = values.head_dim
    chunk_length = keys.codes.shape[3]
    length = min(length, num_chunks * chunk_length)
    query = query if query.stride(-1) == 1 else query.contiguous()

    block_rows = _block_rows(num_rows, max(key_dim, value_dim))
    joined_keys, joined_values = join_chunks(keys), join_chunks(values)
    if joined_keys.codes.shape[2] == joined_values.codes.shape[2]:
        keys, values, chunk_length = joined_keys, joined_values, joined_keys.codes.shape[3]
    stretch = _tokens_per_stretch(keys, values)
    block_tokens = _block_tokens(stretch)
    tiles_per_chunk = _num_tiles(chunk_length, stretch, block_tokens)
    num_full_chunks, rest = divmod(length, chunk_length)
    num_tiles = num_full_chunks * tiles_per_chunk + _num_tiles(rest, stretch, block_tokens)
    row_blocks = triton.cdiv(num_rows, block_rows)
    tiles_per_split = num_split_tiles(
        num_tiles,
        batch_size * num_heads * row_blocks,
        PROGRAMS_PER_SM * (num_sms or device_num_sms(query.device)),
        triton.cdiv(_MIN_TOKENS_PER_SPLIT, block_tokens),
    )
    num_splits = triton.cdiv(num_tiles, tiles_per_split)
    num_planes = len(BIT_PLANES[values.nbits])

    partials = empty_partials(query, num_splits * num_planes, value_dim)
    arguments = {
        **tensor_arguments("query", query, "bhr"),
        **mask_arguments(mask, num_heads, num_rows),
        **{f"{name}_ptr": result for name, result in partials._asdict().items()},
        "number_ptr": number_table(query.device) if has_outliers(keys) or has_outliers(values) else None,
        **side_arguments("key", keys),
        **side_arguments("value", values),
        "num_heads": num_heads,
        "num_rows": num_rows,
        "length": length,
        "length_ptr": num_tokens,
        "chunk_length": chunk_length,
        "num_tiles": num_tiles,
        "tiles_per_chunk": tiles_per_chunk,
        "tiles_per_split": tiles_per_split,
        "scale": scale,
        "QUERIES": _query_registers(keys, packed and query.dtype != torch.float32),
        "PLANES": num_planes,
        "TOKENS_PER_STRETCH": stretch,
        # A tile that may begin within a stored one may reach into the next
        "STORED_TILES": 1 if stretch % STORED_TILE.value == 0 else 2,
        "PARTS": 2 if query.dtype == torch.float32 else 1,
        "PACKED": packed,
        "BLOCK_R": block_rows,
        "BLOCK_T": block_tokens,
        "BLOCK_E": _BLOCK_ENTRIES,
    }
    options = {**OPTIONS, "num_warps": 1, "num_stages": _num_stages(keys, values, block_tokens)}
    return Launch(attend_kernel, (batch_size * num_heads, num_splits, row_blocks), arguments, options, partials)


def _block_rows(num_rows: int, head_dim: int) -> int:
    """Rows a program: columns of tensor cores come in eights."""
    most = max(_MIN_BLOCK_ROWS, _MAX_BLOCK_OUTPUT // triton.next_power_of_2(head_dim))
    return min(most, 16, max(_MIN_BLOCK_ROWS, triton.next_power_of_2(num_rows)))


def _num_stages(keys: StoredGroups, values: StoredGroups, block_tokens: int) -> int:
    """Tiles that are on their way or in use: with which the assembler keeps all in registers."""
    is_plain = keys.low_rank_a is None and not has_outliers(keys) and keys.axis == "channel"
    return 3 if is_plain and keys.nbits == values.nbits == 4 and block_tokens == _BLOCK_TOKENS else 2


def _query_registers(keys: StoredGroups, packed: bool) -> str:
    """
    Choose how queries outlive a chunk: `"kept"`, `"loaded"` with it, or kept but `"rotated"` for its factor with it.
    Each is the choice that spills least: the compiler keeps all that chunks share, and tiles need the registers.
    """
    if keys.low_rank_a is None or not packed:
        return "kept"
    if not has_outliers(keys):
        return "rotated"
    return "kept" if tokens_per_group(keys) else "loaded"


def _tokens_per_stretch(keys: StoredGroups, values: StoredGroups) -> int:
    """Tokens that a tile must lie within, so that the tokens of a tile share their scales; 0: a chunk."""
    return math.gcd(tokens_per_group(keys), tokens_per_group(values))


def _block_tokens(stretch: int) -> int:
    return min(_BLOCK_TOKENS, max(_MIN_BLOCK_TOKENS, triton.next_power_of_2(stretch))) if stretch else _BLOCK_TOKENS


def _num_tiles(length: int, stretch: int, block_tokens: int) -> int:
    """Tiles of the first tokens of a chunk."""
    if stretch == 0:
        return triton.cdiv(length, block_tokens)
    num_stretches, rest = divmod(length, stretch)
    return num_stretches * triton.cdiv(stretch, block_tokens) + triton.cdiv(rest, block_tokens)
