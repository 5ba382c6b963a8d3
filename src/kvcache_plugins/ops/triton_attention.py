"""The door to the Triton attention: parts of a cache in, tensors out. One launch a compressed part, and one at the end
that merges them and attends to the exact parts."""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.triton_kernels.attention.attend import Launch, attend_compressed, prepare
from kvcache_plugins.triton_kernels.attention.combine import combine
from kvcache_plugins.triton_kernels.attention.compressed_tensors import CompressedTensors
from kvcache_plugins.triton_kernels.attention.dense_part import DensePart as KernelDensePart
from kvcache_plugins.triton_kernels.attention.partials import Partials

from .compressed_states import TENSOR_NAMES, CompressedStates
from .kept_step import KeptStep, can_keep_step
from .masking import slice_mask
from .parts import CompressedPart, DensePart
from .rotation import rotate


# Under which names a part keeps a step, and that it was in one
_STEP, _SEEN = "step", "seen"


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
        output = _attend_rows(rows, dense, compressed, scale)
    return output.reshape(batch_size, num_heads, num_queries, -1)


def _attend_rows(
    rows: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> torch.Tensor:
    """The same of rows `[B, H, rows, D]`; of parts that were seen before, by launches that are kept."""
    kept = compressed[0].kept
    step = kept.get(_STEP)
    if isinstance(step, KeptStep) and step.fits(rows, dense, compressed, scale):
        return step(rows, dense[-1])
    if _SEEN in kept and dense and dense[-1].mask is None:
        packed = rows.is_cuda and torch.version.hip is None
        launches = [prepare_part(rows, part, scale, packed) for part in compressed]
        if can_keep_step(rows, dense, compressed, launches):
            step = kept[_STEP] = KeptStep(rows, dense, compressed, launches, scale)
            return step.take_first_result()
    kept[_SEEN] = True
    partials = [_attend_part(rows, part, scale) for part in compressed]
    exact = [KernelDensePart(*part.in_use(), slice_mask(part.mask, 0, part.length)) for part in dense]
    return combine(partials, exact, rows, scale)


def prepare_part(rows: torch.Tensor, part: CompressedPart, scale: float, packed: bool) -> Launch:
    """What attention of rows `[B, H, rows, D]` over a compressed part launches, without launching it."""
    return prepare(rows, _tensors(part.keys), _tensors(part.values), packed=packed, **_sizes(part, scale))


def _attend_part(rows: torch.Tensor, part: CompressedPart, scale: float) -> Partials:
    partials = attend_compressed(rows, _tensors(part.keys), _tensors(part.values), **_sizes(part, scale))
    return partials._replace(output=rotate(partials.output)) if part.values.is_rotated else partials


def _sizes(part: CompressedPart, scale: float) -> dict[str, Any]:
    return {
        "num_chunks": -(-part.length // part.keys.chunk_length),
        "length": part.length,
        "mask": slice_mask(part.mask, 0, part.length),
        "scale": scale,
        "value_head_dim": part.values.head_dim,
    }
