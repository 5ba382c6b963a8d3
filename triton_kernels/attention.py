"""Decode attention over compressed keys and values: dense keys and values are never written to memory.

A program takes one key/value head and one stretch of the sequence (a split) and goes through it in tiles of up to 64
tokens that never straddle a chunk. The query rows of a whole group share every tile. What a key or value is made of
is kept apart for as long as possible, because each part has a cheaper way than to be added up densely:

- codes: one dot with the codes themselves. A scale per channel multiplies the query (or the output), a scale per token
  the scores (or the probabilities), and the zeros become a constant per row. Only groups that fit neither way are
  dequantized in registers;
- low rank: `(q B) A^T` for keys with `q B` once a chunk, `(p A) B^T` for values with the product by `B` once a chunk;
- outliers: query (or probabilities) gathered at 32 entries at once, and scattered to tokens (or channels) by a dot
  with a one-hot matrix: no atomics, so results are the same from run to run.

The splits' partial results are merged by `combine`.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, P bytes a token, G groups, R rank, La
tokens that the low-rank part covers (the chunk's last), N outlier entries a chunk.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from kvcache_plugins.triton_kernels.attention_kernel import attend_kernel


_MIN_TOKENS_PER_SPLIT = 256
_DEFAULT_NUM_SMS = 16
# Two programs share a multiprocessor, so that one computes while the other waits for memory
_PROGRAMS_PER_SM = 2
# The smallest side of an operand of `tl.dot`
_MIN_DOT_SIZE = 16
_MIN_BLOCK_TOKENS = 32
_MAX_BLOCK_TOKENS = 64
_BLOCK_ENTRIES = 32


_TUNING_KEY = [
    *(f"{side}_{part}" for side in ("KEY", "VALUE") for part in ("DIM", "NBITS", "FOLD", "RANK", "OUTLIERS")),
    "MASK",
    "BLOCK_R",
    "BLOCK_T",
]


class CompressedTensors(NamedTuple):
    """
    Compressed keys or values; every tensor may be a strided view whose last dimension is contiguous.

    Args:
        codes (`torch.Tensor` of shape `[B, H, M, L, P]`, uint8):
            Codes packed by slabs, see `kvcache_plugins.ops.quantization`.
        scale, zero (`torch.Tensor` of shape `[B, H, M, G, D]` or `[B, H or 1, M, L, G]`):
            A value is `zero + scale * code`. Float16, with the same strides, in the first shape for axis `"channel"`.
        low_rank_a, low_rank_b (`torch.Tensor` of shapes `[B, H, M, La, R]` and `[B, H, M, D, R]`, *optional*):
            `A B^T` is added to the chunk's last La tokens.
        outlier_indices, outlier_values (`torch.Tensor` of shape `[B, 1, M, N]`, *optional*):
            What is added to single values, sorted by tile of 64 tokens and head. An index is
            `(token within the tile << ceil(log2(D))) | channel`.
        outlier_offsets (`torch.Tensor` of shape `[B, 1, M, tiles * H + 1]`, int32, *optional*):
            Where the entries of each tile and head begin.
        nbits (`int`):
            Bits a code: 2, 3, 4 or 8.
        axis (`str`):
            `"channel"` if tokens of one channel share a scale, `"token"` if channels of one token do.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    low_rank_a: torch.Tensor | None
    low_rank_b: torch.Tensor | None
    outlier_indices: torch.Tensor | None
    outlier_values: torch.Tensor | None
    outlier_offsets: torch.Tensor | None
    nbits: int
    axis: str


class Partials(NamedTuple):
    """
    An attention per split before its normalisation, float32.

    Args:
        output (`torch.Tensor` of shape `[B, H, splits, rows, value D]`):
            Sum of the values, weighted by `2 ** (score - maximum)`.
        maximum, total (`torch.Tensor` of shape `[B, H, splits, rows]`):
            Largest score (in base 2: `log2(e)` times the usual score; `-inf` where nothing is attended to) and sum of
            the weights.
    """

    output: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


def attend_compressed(
    query: torch.Tensor,
    keys: CompressedTensors,
    values: CompressedTensors,
    *,
    num_chunks: int,
    length: int,
    mask: torch.Tensor | None = None,
    scale: float,
    value_head_dim: int | None = None,
    num_sms: int | None = None,
) -> Partials:
    """
    Attends to one block of compressed chunks: partial results, to be merged by `combine`.

    Args:
        query (`torch.Tensor` of shape `[B, H, rows, D]`):
            Queries. A row is `query head within the group * query tokens + query token`.
        keys, values (`CompressedTensors`):
            What to attend to.
        num_chunks (`int`):
            Chunks in use; the storage may hold more.
        length (`int`):
            Tokens in use, at most `num_chunks * L`: the last chunk may be cut.
        mask (`torch.Tensor` of shape `[B or 1, H * groups or 1, query tokens or 1, length]`, *optional*):
            Boolean (`True` attends) or added to the scores.
        scale (`float`):
            Factor of the scores.
        value_head_dim (`int`, *optional*, defaults to D):
            Channels of the values.
        num_sms (`int`, *optional*, defaults to the device's):
            Multiprocessors to keep busy, which sets the number of splits.
    """
    batch_size, num_heads, num_rows, key_dim = query.shape
    value_dim = key_dim if value_head_dim is None else value_head_dim
    chunk_length = keys.codes.shape[3]
    length = min(length, num_chunks * chunk_length)
    query = query if query.stride(-1) == 1 else query.contiguous()

    block_rows = block_size(num_rows)
    block_tokens = _block_tokens(keys, values, max(key_dim, value_dim))
    tiles_per_chunk = triton.cdiv(chunk_length, block_tokens)
    num_full_chunks, rest = divmod(length, chunk_length)
    num_tiles = num_full_chunks * tiles_per_chunk + triton.cdiv(rest, block_tokens)
    num_sms = _device_num_sms(query.device) if num_sms is None else num_sms
    num_programs = _PROGRAMS_PER_SM * num_sms
    tiles_per_split = max(
        triton.cdiv(_MIN_TOKENS_PER_SPLIT, block_tokens),
        triton.cdiv(num_tiles * batch_size * num_heads, num_programs),
    )
    num_splits = triton.cdiv(num_tiles, tiles_per_split)

    output = query.new_empty(batch_size, num_heads, num_splits, num_rows, value_dim, dtype=torch.float32)
    maximum = query.new_empty(batch_size, num_heads, num_splits, num_rows, dtype=torch.float32)
    total = torch.empty_like(maximum)
    if num_splits == 0:
        return Partials(output, maximum, total)

    kernel = _launchable(query.is_cuda)
    kernel[(batch_size * num_heads, num_splits)](
        query_ptr=query,
        query_stride_b=query.stride(0),
        query_stride_h=query.stride(1),
        query_stride_r=query.stride(2),
        **mask_arguments(mask, num_heads, num_rows),
        output_ptr=output,
        maximum_ptr=maximum,
        total_ptr=total,
        **_side_arguments("key", keys, key_dim, block_tokens, block_rows),
        **_side_arguments("value", values, value_dim, block_tokens, block_rows),
        num_heads=num_heads,
        num_rows=num_rows,
        length=length,
        chunk_length=chunk_length,
        num_tiles=num_tiles,
        tiles_per_chunk=tiles_per_chunk,
        tiles_per_split=tiles_per_split,
        scale=scale,
        PARTS=2 if query.dtype == torch.float32 else 1,
        BLOCK_R=block_rows,
        BLOCK_T=block_tokens,
        BLOCK_E=_BLOCK_ENTRIES,
    )
    return Partials(output, maximum, total)


def dot_precision(dtype: torch.dtype) -> str:
    """A product of float16 or bfloat16 queries is exact in TF32; one of float32 is not."""
    return "ieee" if dtype == torch.float32 else "tf32"


def block_size(size: int) -> int:
    """The block that covers `size` and that `tl.dot` takes."""
    return max(_MIN_DOT_SIZE, triton.next_power_of_2(size))


def min_columns(block_rows: int) -> int:
    """
    How wide every product of a kernel has to be for warps to share its columns.

    Triton lays out chained products all alike, and gives each warp its own rows once one of them is not wider than
    high. With 16 rows, four warps would then each do the whole work.
    """
    return 2 * block_rows if block_rows < 64 else _MIN_DOT_SIZE


def mask_arguments(
    mask: torch.Tensor | None, num_heads: int, num_rows: int, prefix: str = "mask"
) -> dict[str, object]:
    """The kernel arguments for a mask `[B or 1, query heads or 1, query tokens or 1, T]`, `num_queries` among them."""
    names = [f"{prefix}_stride_{dimension}" for dimension in "bhqt"]
    query_name = "num_queries" if prefix == "mask" else f"{prefix}_num_queries"
    if mask is None:
        return {f"{prefix}_ptr": None, **dict.fromkeys(names, 0), query_name: 1, prefix.upper(): 0}
    _, mask_heads, num_queries, _ = mask.shape
    if num_queries == 1 and mask_heads > 1:
        num_queries = num_rows // (mask_heads // num_heads)
    # A dimension of one is shared by all
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    strides[3] = mask.stride(3)
    kind = 1 if mask.dtype == torch.bool else 2
    pointer = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return {
        f"{prefix}_ptr": pointer,
        **dict(zip(names, strides, strict=True)),
        query_name: num_queries,
        prefix.upper(): kind,
    }


def _block_tokens(keys: CompressedTensors, values: CompressedTensors, head_dim: int) -> int:
    """Tokens a tile: a divisor of 64, and of the groups of tokens that share a scale where that can be."""
    # What a tile of 64 needs beside wide heads or outliers does not fit into registers
    has_outliers = keys.outlier_indices is not None or values.outlier_indices is not None
    most = _MAX_BLOCK_TOKENS if head_dim <= (64 if has_outliers else 128) else _MAX_BLOCK_TOKENS // 2
    block = min(most, max(_MIN_BLOCK_TOKENS, block_size(keys.codes.shape[3])))
    for side in (keys, values):
        size = side.codes.shape[3] // side.scale.shape[3]
        if side.axis == "channel" and side.scale.shape[3] > 1 and size == _MIN_BLOCK_TOKENS:
            block = min(block, size)
    return block


def _fold(side: CompressedTensors, tokens_per_group: int, block_tokens: int) -> int:
    """Where scales are applied: to a tile's channels (0), to its tokens (1), or to every code (2, 3)."""
    if side.axis == "channel":
        return 0 if side.scale.shape[3] == 1 or tokens_per_group % block_tokens == 0 else 3
    return 1 if side.scale.shape[4] == 1 else 2


def _side_arguments(
    name: str, side: CompressedTensors, head_dim: int, block_tokens: int, block_rows: int
) -> dict[str, object]:
    """The kernel arguments for the keys or the values."""
    if side.scale.stride() != side.zero.stride():
        raise ValueError("`scale` and `zero` must have the same strides")
    chunk_length = side.codes.shape[3]
    by_channel = side.axis == "channel"
    tokens_per_group = chunk_length // side.scale.shape[3]
    low_rank = side.low_rank_a is not None and side.low_rank_a.shape[3] > 0
    rank = side.low_rank_a.shape[4] if side.low_rank_a is not None and low_rank else 0
    covered = side.low_rank_a.shape[3] if side.low_rank_a is not None else 0
    has_outliers = side.outlier_indices is not None and side.outlier_indices.shape[3] > 0
    scale_strides = list(side.scale.stride()[:4])
    if side.scale.shape[1] == 1:
        scale_strides[1] = 0
    upper = name.upper()
    return {
        **_pointer(f"{name}_codes", side.codes, "bhmT"),
        f"{name}_scale_ptr": side.scale,
        f"{name}_zero_ptr": side.zero,
        **_strides(f"{name}_scale", scale_strides, "bhmS"),
        **_pointer(f"{name}_a", side.low_rank_a, "bhmT"),
        **_pointer(f"{name}_b", side.low_rank_b, "bhmD"),
        **_entry_arguments(name, side),
        f"{name}_low_rank_start": chunk_length - covered,
        f"{name}_tokens_per_group": tokens_per_group if by_channel else 1,
        f"{upper}_DIM": head_dim,
        f"{upper}_NBITS": side.nbits,
        f"{upper}_FOLD": _fold(side, tokens_per_group, block_tokens),
        f"{upper}_CHANNELS_PER_GROUP": 1 if by_channel else head_dim // side.scale.shape[4],
        f"{upper}_RANK": rank,
        f"{upper}_OUTLIERS": has_outliers,
        "BLOCK_K" if name == "key" else "BLOCK_V": block_size(head_dim),
        f"BLOCK_{upper}_RANK": max(block_size(rank), min_columns(block_rows)),
    }


def _pointer(name: str, tensor: torch.Tensor | None, dimensions: str) -> dict[str, object]:
    strides = (0,) * len(dimensions) if tensor is None else tensor.stride()[: len(dimensions)]
    return {f"{name}_ptr": tensor, **_strides(name, strides, dimensions)}


def _strides(name: str, strides: Sequence[int], dimensions: str) -> dict[str, object]:
    """
    The strides by name. A row's is a constant of the kernel (upper case): it hardly varies, and addresses that differ
    by constants share a register.
    """
    arguments: dict[str, object] = {}
    for dimension, stride in zip(dimensions, strides, strict=True):
        argument = f"{name}_stride_{dimension}"
        arguments[argument.upper() if dimension.isupper() else argument] = stride
    return arguments


def _entry_arguments(name: str, side: CompressedTensors) -> dict[str, object]:
    indices, values, offsets = side.outlier_indices, side.outlier_values, side.outlier_offsets
    if indices is None or values is None or offsets is None:
        indices = values = offsets = None
    elif indices.stride() != values.stride():
        raise ValueError("`outlier_indices` and `outlier_values` must have the same strides")
    return {
        f"{name}_entry_index_ptr": indices,
        f"{name}_entry_value_ptr": values,
        f"{name}_entry_stride_b": 0 if indices is None else indices.stride(0),
        f"{name}_entry_stride_m": 0 if indices is None else indices.stride(2),
        f"{name}_offset_ptr": offsets,
        f"{name}_offset_stride_b": 0 if offsets is None else offsets.stride(0),
        f"{name}_offset_stride_m": 0 if offsets is None else offsets.stride(2),
    }


@functools.cache
def _device_num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _launchable(on_gpu: bool) -> Any:
    """The kernel, tuned where there is a GPU to tune it on."""
    if not on_gpu:
        return attend_kernel
    configs = [triton.Config({}, num_warps=warps, num_stages=stages) for warps in (4, 8) for stages in (1, 2)]
    return triton.autotune(configs=configs, key=_TUNING_KEY)(attend_kernel)
