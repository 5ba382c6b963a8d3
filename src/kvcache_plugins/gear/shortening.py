"""Tokens cut off a single chunk of compressed states, at its end or at its beginning.

What is left is a copy, so that what was cut off is really freed, and whoever shares the longer one keeps it.
"""

import math

import torch

from kvcache_plugins.ops.compressed_states import CompressedStates
from kvcache_plugins.ops.outliers import OUTLIER_TILE
from kvcache_plugins.ops.quantization import Grouping


def keep_tokens(states: CompressedStates, length: int) -> CompressedStates:
    """The first `length` tokens of a single chunk; factors and outliers of the others go too."""
    if length == states.chunk_length:
        return states
    tensors = {"codes": states.codes[:, :, :, :length]}
    if states.grouping.axis == "token":
        tensors |= {name: getattr(states, name)[:, :, :, :length] for name in ("scale", "zero")}
    elif states.grouping.group_size is not None:
        groups = length // states.grouping.group_size
        tensors |= {name: getattr(states, name)[:, :, :, :groups] for name in ("scale", "zero")}
    if states.low_rank_a is not None:
        first = states.chunk_length - states.low_rank_a.shape[3]
        tensors["low_rank_a"] = states.low_rank_a[:, :, :, : max(length - first, 0)]
    if states.outlier_offsets is not None:
        num_slots = -(-length // OUTLIER_TILE) * states.codes.shape[1]
        offsets = states.outlier_offsets[..., : num_slots + 1]
        kept = int(offsets[..., -1].max())
        tensors["outlier_offsets"] = offsets
        tensors |= {name: getattr(states, name)[..., :kept] for name in ("outlier_indices", "outlier_values")}
    # Copies, so that what was cut off is really freed
    return states.replace({name: tensor.clone() for name, tensor in tensors.items()})


def drop_step(keys: Grouping) -> int:
    """Tokens that can be cut off the beginning of a chunk together: whole groups of keys, and tiles of outliers."""
    return math.lcm(OUTLIER_TILE, keys.group_size or 1) if keys.axis == "channel" else OUTLIER_TILE


def drop_tokens(states: CompressedStates, count: int) -> CompressedStates:
    """A single chunk without its first `count` tokens, a multiple of `drop_step`."""
    tensors = {"codes": states.codes[:, :, :, count:]}
    if states.grouping.axis == "token":
        tensors |= {name: getattr(states, name)[:, :, :, count:] for name in ("scale", "zero")}
    elif states.grouping.group_size is not None:
        groups = count // states.grouping.group_size
        tensors |= {name: getattr(states, name)[:, :, :, groups:] for name in ("scale", "zero")}
    if states.low_rank_a is not None:
        without = states.chunk_length - states.low_rank_a.shape[3]
        tensors["low_rank_a"] = states.low_rank_a[:, :, :, max(count - without, 0) :]
    if states.outlier_offsets is not None:
        tensors |= _drop_outliers(states, count)
    return states.replace({name: tensor.clone() for name, tensor in tensors.items()})


def _drop_outliers(states: CompressedStates, count: int) -> dict[str, torch.Tensor]:
    """Outliers of the other tokens, which begin at another place of the list in every item."""
    indices, values, offsets = states.outlier_indices, states.outlier_values, states.outlier_offsets
    assert indices is not None and values is not None and offsets is not None
    offsets = offsets[..., count // OUTLIER_TILE * states.codes.shape[1] :]
    first, end = offsets[..., :1], offsets[..., -1:]
    # What has no data is told as if outliers were spread evenly
    num_left = -(-indices.shape[3] * (states.chunk_length - count) // states.chunk_length)
    if not offsets.is_meta:
        num_left = int((end - first).max())
    places = first.long() + torch.arange(num_left, device=offsets.device)
    in_use, places = places < end, places.clamp(max=max(indices.shape[3] - 1, 0))
    return {
        "outlier_offsets": offsets - first,
        "outlier_indices": torch.where(in_use, indices.gather(3, places), 0),
        "outlier_values": torch.where(in_use, values.gather(3, places), 0),
    }
