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
from typing import Any

import torch
import triton

from kvcache_plugins.triton_kernels.dot import block_size

from .arguments import side_arguments
from .attend_kernel import attend_kernel
from .compressed_tensors import CompressedTensors
from .masks import mask_arguments
from .partials import Partials


_MIN_TOKENS_PER_SPLIT = 256
_DEFAULT_NUM_SMS = 16
# Two programs share a multiprocessor, so that one computes while the other waits for memory
_PROGRAMS_PER_SM = 2
_MIN_BLOCK_TOKENS = 32
_MAX_BLOCK_TOKENS = 64
_BLOCK_ENTRIES = 32


_TUNING_KEY = [
    *(f"{side}_{part}" for side in ("KEY", "VALUE") for part in ("DIM", "NBITS", "FOLD", "RANK", "OUTLIERS")),
    "MASK",
    "BLOCK_R",
    "BLOCK_T",
]


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
        **side_arguments("key", keys, key_dim, block_tokens, block_rows),
        **side_arguments("value", values, value_dim, block_tokens, block_rows),
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
