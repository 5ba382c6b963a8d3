"""The door to the Triton attention: parts of a cache in, tensors out. One launch a compressed part, and one at the end
that merges them and attends to the exact parts."""

from collections.abc import Sequence

import torch

from kvcache_plugins.codecs.groups import TENSOR_NAMES, CompressedStates
from kvcache_plugins.codecs.rotation import rotate
from kvcache_plugins.triton_kernels.attention.attend import prepare
from kvcache_plugins.triton_kernels.attention.compressed_tensors import CompressedTensors
from kvcache_plugins.triton_kernels.dot import has_pairs

from .kept_step import PartStep, attend_parts
from .masking import slice_mask
from .parts import CompressedPart, DensePart


def _tensors(states: CompressedStates) -> CompressedTensors:
    tensors = {name: getattr(states, name) for name in TENSOR_NAMES}
    return CompressedTensors(
        **tensors, nbits=states.nbits, axis=states.grouping.axis, group_size=states.grouping.group_size
    )


def attend(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> torch.Tensor:
    """
    Attention of a few queries over all parts; see `ops.attention.attend`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts, at most two.
        compressed (`Sequence[CompressedPart]`): compressed parts, at least one.
        scale (`float`): factor of the scores.
    """
    batch_size, num_heads, num_queries, head_dim = query.shape
    num_key_value_heads = compressed[0].keys.codes.shape[1]
    rows = query.reshape(batch_size, num_key_value_heads, -1, head_dim)
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(query):
        output = attend_parts(rows, dense, compressed, scale, prepare_part)
    return output.reshape(batch_size, num_heads, num_queries, -1)


def prepare_part(rows: torch.Tensor, part: CompressedPart, scale: float, packed: bool | None = None) -> PartStep:
    """
    What attention of rows `[B, H, rows, D]` over a compressed part does, without doing it; `packed`: see `prepare`, by
    default where rows are on a GPU of NVIDIA's.
    """
    launch = prepare(
        rows,
        _tensors(part.keys),
        _tensors(part.values),
        num_chunks=-(-part.length // part.keys.chunk_length),
        length=part.length,
        num_tokens=part.num_tokens,
        mask=slice_mask(part.mask, 0, part.length),
        scale=scale,
        value_head_dim=part.values.head_dim,
        packed=has_pairs(rows.device.type) if packed is None else packed,
    )
    return PartStep(launch, _rotate_back if part.values.is_rotated else None)


def _rotate_back(output: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return rotate(output)
