"""Attention over groups, in C: codes that share scales and zeros, low-rank factors and outliers. See `cpu/groups.c`.

Legend: B batch, H key/value heads, G query heads a key/value head, Q new tokens, D channels.
"""

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from kvcache_plugins.codecs.groups import CompressedStates
from kvcache_plugins.codecs.outliers import channel_bits, num_offsets
from kvcache_plugins.codecs.quantization import packed_size
from kvcache_plugins.codecs.rotation import rotation_size
from kvcache_plugins.ops.parts import CompressedPart, DensePart

from .layer import GROUPS_PART, MOST_CHANNELS, AttentionCall
from .library import ADDRESS, LONG, address_of


_TENSORS = ("codes", "scale", "zero", "low_rank_a", "low_rank_b", "indices", "outliers", "offsets")
_NUMBERS = (
    *("dim", "nbits", "row_size", "by_channel", "groups", "scale_heads", "rotation_size", "rank", "a_tokens"),
    *("num_outliers", "num_offsets", "is_wide", "channel_bits"),
)


class _Side(ctypes.Structure):
    _fields_ = (*((name, ADDRESS) for name in _TENSORS), *((name, LONG) for name in _NUMBERS))


class _Groups(ctypes.Structure):
    _fields_ = (("chunks", LONG), ("chunk_length", LONG), ("keys", ADDRESS), ("values", ADDRESS))


# Of states that live, where they are contiguous as they are
_SIDES: "WeakKeyDictionary[CompressedStates, _Side]" = WeakKeyDictionary()


def can_attend(part: DensePart | CompressedPart) -> bool:
    """Whether heads are not too large for the kernel."""
    dims = [
        side.head_dim if isinstance(side, CompressedStates) else side.shape[3] for side in (part.keys, part.values)
    ]
    return max(dims) <= MOST_CHANNELS


def attend(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> torch.Tensor:
    """Attention `[B, H * G, Q, value head dim]` of a few queries over all parts; see `ops.attention.attend`."""
    return call_of(query, dense, compressed, scale).run()


def call_of(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> AttentionCall:
    """
    Attention of a few queries over all parts, to be run or prepared.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts.
        compressed (`Sequence[CompressedPart]`): compressed parts.
        scale (`float`): factor of the scores.

    Raises:
        ValueError: if parts do not fit each other, or anything in them is not what its kernel takes it for.
    """
    if compressed:
        num_heads, value_dim = compressed[0].keys.codes.shape[1], compressed[0].values.head_dim
    else:
        num_heads, value_dim = dense[0].values.shape[1], dense[0].values.shape[3]
    call = AttentionCall(query, num_heads, value_dim, scale)
    for part in compressed:
        _add(call, part)
    for exact in dense:
        call.add_exact(exact)
    return call


def _add(call: AttentionCall, part: CompressedPart) -> None:
    sides = part.keys, part.values
    chunks, chunk_length = part.keys.num_chunks, part.keys.chunk_length
    sizes = call.batch_size, call.num_heads, chunks, chunk_length
    dims = part.keys.head_dim, part.values.head_dim
    if any(side.codes.shape[:4] != sizes for side in sides) or dims != (call.key_dim, call.value_dim):
        shapes = [tuple(side.codes.shape[:4]) for side in sides]
        raise ValueError(
            f"compressed keys and values have to be {sizes} of {call.key_dim} and {call.value_dim} channels, but got "
            f"{shapes[0]} of {dims[0]} and {shapes[1]} of {dims[1]}"
        )
    if not 0 <= part.length <= chunks * chunk_length:
        raise ValueError(f"{part.length} tokens of {chunks} chunks of {chunk_length}")
    if part.values.grouping.axis == "channel" or part.keys.is_rotated:
        raise ValueError("the compiled kernel takes values in groups of a token, and keys that are not rotated")
    keys, values = (_side(call, side) for side in sides)
    groups = call.keep(_Groups(chunks, chunk_length, ctypes.addressof(keys), ctypes.addressof(values)))
    call.add(GROUPS_PART, ctypes.addressof(groups), part.length, part.mask)


def _side(call: AttentionCall, states: CompressedStates) -> _Side:
    """Addresses and sizes of one side, kept alive by the call."""
    side = _SIDES.get(states)
    if side is None:
        stored = states
        if not all(tensor.is_contiguous() for _, tensor in states.named_tensors()):
            stored = states.map(call.contiguous)
        side = _checked(stored)
        if stored is states:
            _SIDES[states] = side
    call.keep(states)
    kept: _Side = call.keep(side)
    return kept


def _checked(states: CompressedStates) -> _Side:
    batch_size, num_heads, chunks, length, _ = states.codes.shape
    dim, scales, first = states.head_dim, states.scale.shape, (batch_size, num_heads, chunks)
    by_channel, row_size = states.grouping.axis == "channel", packed_size(dim, states.nbits)
    groups, most = (scales[3], length) if by_channel else (scales[4], dim)
    if scales[1] not in (1, num_heads) or groups == 0 or most % groups:
        raise ValueError(f"scales of shape {tuple(scales)} for {num_heads} heads, {length} tokens, {dim} channels")
    grouped = batch_size, scales[1], chunks, *((groups, dim) if by_channel else (length, groups))
    side = _Side(
        codes=address_of("codes", states.codes, torch.uint8, (*first, length, row_size)),
        scale=address_of("scale", states.scale, torch.float16, grouped),
        zero=address_of("zero", states.zero, torch.float16, grouped),
        dim=dim,
        nbits=states.nbits,
        row_size=row_size,
        by_channel=by_channel,
        groups=groups,
        scale_heads=scales[1],
        rotation_size=rotation_size(dim) if states.is_rotated else 1,
        channel_bits=channel_bits(dim),
    )
    a, b = states.low_rank_a, states.low_rank_b
    if a is not None and b is not None:
        side.a_tokens, side.rank = a.shape[3:]
        if side.a_tokens > length or side.rank > MOST_CHANNELS:
            raise ValueError(f"low rank of shape {tuple(a.shape)} for chunks of {length} tokens")
        side.low_rank_a = address_of("low_rank_a", a, torch.float16, (*first, side.a_tokens, side.rank))
        side.low_rank_b = address_of("low_rank_b", b, torch.float16, (*first, dim, side.rank))
    indices, values, offsets = states.outlier_indices, states.outlier_values, states.outlier_offsets
    if indices is not None and values is not None and offsets is not None:
        side.num_outliers, side.num_offsets = indices.shape[3], num_offsets(length, num_heads)
        side.is_wide = indices.dtype == torch.int32
        sizes = batch_size, 1, chunks
        side.indices = address_of("outlier_indices", indices, (torch.int16, torch.int32), (*sizes, side.num_outliers))
        side.outliers = address_of("outlier_values", values, torch.float16, (*sizes, side.num_outliers))
        side.offsets = address_of("outlier_offsets", offsets, torch.int32, (*sizes, side.num_offsets))
    return side
