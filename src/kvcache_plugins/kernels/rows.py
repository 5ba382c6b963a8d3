"""Attention over transform-coded rows, of prompts' own tables or of calibrated bases, by the C kernels: `cpu/rows.c`.

Of tables C takes what is stored, and believes nothing of it but sizes, which are checked here. What belongs to a model
is made once: pairs of channels and their angles, and bases of keys in the order in which C reads them.

Legend: B batch, H key/value heads, G query heads a key/value head, Q new tokens, D head dim, R bytes of a row, P pairs
of channels, rounded up to 16.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from weakref import WeakKeyDictionary

import torch

from kvcache_plugins.codecs.basis import Basis
from kvcache_plugins.codecs.quantizers import MAX_WIDTH, QUANTIZERS
from kvcache_plugins.codecs.rope import RotaryLayout
from kvcache_plugins.codecs.rotation import rotation_size
from kvcache_plugins.codecs.rows import RowCodec, RowTable, scale_of
from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.row_attention import CodedPart

from .layer import BASIS_ROWS_PART, MOST_CHANNELS, ROWS_PART, TILE, AttentionCall
from .library import ADDRESS, LONG, address_of, level


# As in `rows.c`: tokens from one position to the next that angles are given of, channels that are summed up at a time
_ANCHOR_TOKENS, _GROUP = 32 * TILE, 4
# Tokens of a strip at each level of instructions
_STRIPS = {"avx2": 32, "avx512": 64}
_NUM_WIDTHS = MAX_WIDTH + 1
# Bases of keys `[H, P / 2, K, 4]` and means `[H, P, 2]` of tables that live
_BASES: "WeakKeyDictionary[Basis, dict[RotaryLayout, tuple[torch.Tensor, torch.Tensor]]]" = WeakKeyDictionary()


class _Side(ctypes.Structure):
    _fields_ = (
        ("rows", ADDRESS),
        ("capacity", LONG),
        ("size", LONG),
        ("widths", ADDRESS),
        ("blocks", LONG),
        ("coefficients", ADDRESS),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("keys", _Side),
        ("values", _Side),
        *((name, ADDRESS) for name in ("multipliers", "scales")),
        *((name, LONG) for name in ("num_pairs", "num_anchors")),
        *((name, ADDRESS) for name in ("pairs", "offsets", "turn", "anchors", "order")),
        ("is_wide", LONG),
        *((name, ADDRESS) for name in ("mean", "deviation", "value_deviation")),
        *((name, LONG) for name in ("rotation", "num_components")),
        *((name, ADDRESS) for name in ("key_basis", "key_mean", "value_basis", "value_steps", "value_factors")),
        ("value_mean", ADDRESS),
    )


def can_attend(parts: Sequence[DensePart | CodedPart]) -> bool:
    """Whether heads are not too large for the kernel."""
    first = parts[0]
    dims = _head_dims(first) if isinstance(first, CodedPart) else (first.keys.shape[3], first.values.shape[3])
    return max(dims) <= MOST_CHANNELS


def prepare_rows(
    query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_heads: int, scale: float
) -> AttentionCall:
    """
    Attention of a few queries over all parts, ready to run or to be prepared for others.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        parts (`Sequence[DensePart | CodedPart]`): what is attended to.
        num_heads (`int`): H.
        scale (`float`): factor of the scores.
    """
    first = parts[0]
    value_dim = _head_dims(first)[1] if isinstance(first, CodedPart) else first.values.shape[3]
    call = AttentionCall(query, num_heads, value_dim, scale)
    for part in parts:
        if isinstance(part, CodedPart):
            _add(call, part)
        else:
            call.add_exact(part)
    return call


def attend_rows(
    query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_heads: int, scale: float
) -> torch.Tensor:
    """Attention of a few queries over all parts, as in `prepare_rows`; see `codecs.attention.attend`."""
    return prepare_rows(query, parts, num_heads, scale).run()


def _tables(part: CodedPart) -> tuple[RowTable, RowTable]:
    assert isinstance(part.codec, RowCodec), "only rows of tables have kernels"
    return part.codec.tables(part.keys.device)


def _head_dims(part: CodedPart) -> tuple[int, int]:
    keys, values = _tables(part)
    return keys.head_dim, values.head_dim


def _add(call: AttentionCall, part: CodedPart) -> None:
    stored, (keys, values) = call.keep(_Rows()), _tables(part)
    if keys.basis is None:
        _add_tables(call, stored, keys, values)
    else:
        _add_bases(call, stored, keys, values)
    _add_angles(call, stored, keys.rope, part)
    of_keys, of_values, scales, multipliers = _codebook(keys.quantizer)
    stored.scales, stored.multipliers = scales.data_ptr(), multipliers.data_ptr()
    for side, rows, table, coefficients, dim in (
        (stored.keys, part.keys, keys, of_keys, call.key_dim),
        (stored.values, part.values, values, of_values, call.value_dim),
    ):
        rows, widths = call.contiguous(rows), call.contiguous(table.widths)
        side.capacity, side.size, side.blocks = rows.shape[2], rows.shape[3], widths.shape[2]
        if (
            side.capacity < part.length
            or not 0 < side.size <= MOST_CHANNELS + 1
            or table.head_dim != dim
            or 8 * (side.blocks - 1) >= dim
            # Only components may be fewer than channels
            or (table.basis is None and 8 * side.blocks < dim)
        ):
            raise ValueError(
                f"{part.length} rows {tuple(rows.shape)} in blocks {tuple(widths.shape)} of {dim} channels"
            )
        side.rows = address_of("rows", rows, torch.uint8, (call.batch_size, call.num_heads, None, None))
        batch_size = call.batch_size if table.basis is None else 1
        side.widths = address_of("widths", widths, torch.uint8, (batch_size, call.num_heads, None))
        side.coefficients = coefficients.data_ptr()
    kind = ROWS_PART if keys.basis is None else BASIS_ROWS_PART
    call.add(kind, ctypes.addressof(stored), part.length, part.mask)


def _add_tables(call: AttentionCall, stored: _Rows, keys: RowTable, values: RowTable) -> None:
    sizes = call.batch_size, call.num_heads
    assert keys.order is not None and keys.mean is not None and keys.deviation is not None
    assert values.deviation is not None
    order, mean, deviation = map(call.contiguous, (keys.order, keys.mean, keys.deviation))
    stored.order = address_of("order", order, (torch.uint8, torch.int16), (*sizes, call.key_dim))
    stored.is_wide = order.dtype != torch.uint8
    stored.mean = address_of("mean", mean, torch.float16, (*sizes, call.key_dim))
    stored.deviation = address_of("deviation", deviation, torch.float16, (*sizes, call.key_dim))
    deviation = call.contiguous(values.deviation)
    stored.value_deviation = address_of("deviation", deviation, torch.float16, (*sizes, 1))
    stored.rotation = rotation_size(call.value_dim)
    if values.mean is not None:
        mean = call.contiguous(values.mean)
        stored.value_mean = address_of("value_mean", mean, torch.float16, (*sizes, call.value_dim))


def _add_bases(call: AttentionCall, stored: _Rows, keys: RowTable, values: RowTable) -> None:
    own, of_values = keys.basis, values.basis
    assert own is not None and keys.mean is not None and keys.rope is not None
    assert of_values is not None and values.mean is not None
    basis, mean = call.keep(_key_basis(own, keys.mean, keys.rope))
    num_heads, dim = call.num_heads, call.value_dim
    size = len(_pairs(keys.rope)[0])
    stored.num_components = basis.shape[2]
    stored.key_basis = address_of("basis", basis, torch.float32, (num_heads, size // 2, None, _GROUP))
    stored.key_mean = address_of("mean", mean, torch.float32, (num_heads, size, 2))
    stored.value_basis = address_of("basis", of_values.vectors, torch.int8, (num_heads, dim, dim))
    stored.value_steps = address_of("steps", of_values.steps, torch.float32, (num_heads, dim))
    stored.value_factors = address_of("factors", of_values.factors, torch.float32, (num_heads, dim))
    stored.value_mean = address_of("mean", values.mean, torch.float16, (1, num_heads, dim))


def _add_angles(call: AttentionCall, stored: _Rows, layout: RotaryLayout | None, part: CodedPart) -> None:
    count, start, padding = -(-part.length // _ANCHOR_TOKENS), part.positions.first, part.positions.padding
    assert layout is not None
    if layout.head_dim != call.key_dim:
        raise ValueError(f"a rotary embedding of {layout.head_dim} channels for queries of {call.key_dim}")
    pairs, num_pairs = _pairs(layout)
    offsets, turn = _strip_angles(layout, _STRIPS.get(level(), 16))
    if padding is None:
        anchors = call.keep(_anchors(layout, start, count)).expand(call.batch_size, -1, -1, -1)
    else:
        first = start - padding.cpu().long()
        anchors = _angles_at(layout, first[:, None] + torch.arange(count) * _ANCHOR_TOKENS)
    # Not of what is stored, so a copy of it does no harm
    anchors = call.keep(anchors.contiguous())
    stored.num_pairs, stored.num_anchors = num_pairs, count
    stored.pairs, stored.offsets, stored.turn = pairs.data_ptr(), offsets.data_ptr(), turn.data_ptr()
    stored.anchors = address_of("anchors", anchors, torch.float32, (call.batch_size, count, 2, len(pairs)))


@cache
def _pairs(layout: RotaryLayout) -> tuple[torch.Tensor, int]:
    """Pairs of channels that are turned together `[P, 2]`, int32, -1 for none; and how many there are."""
    partners = layout.partners(torch.device("cpu")).tolist()
    pairs = [[channel, other] for channel, other in enumerate(partners) if other > channel]
    # Those that are not turned share pairs whose angles are 0
    alone = [channel for channel, other in enumerate(partners) if other == channel]
    pairs += [[*alone[i : i + 2], -1][:2] for i in range(0, len(alone), 2)]
    return torch.tensor(pairs + [[-1, -1]] * (-len(pairs) % 16), dtype=torch.int32), len(pairs)


def _angles_at(layout: RotaryLayout, positions: torch.Tensor) -> torch.Tensor:
    """Cosines and signed sines of the first channel of pairs at positions, `[*positions.shape, 2, P]`."""
    channels = _pairs(layout)[0][:, 0].long()
    frequencies = layout.channel_frequencies(torch.device("cpu"))[channels.clamp(min=0)]
    angles = positions.double()[..., None] * torch.where(channels < 0, 0.0, frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-2).float()


@cache
def _strip_angles(layout: RotaryLayout, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of the offsets in a strip of `size` tokens, `[P, 2, size]`, and of its length, `[2, P]`."""
    angles = _angles_at(layout, torch.arange(size + 1))
    return angles[:-1].permute(2, 1, 0).contiguous(), angles[-1].contiguous()


# Layers of a model ask for the same
@lru_cache(maxsize=64)
def _anchors(layout: RotaryLayout, start: int, count: int) -> torch.Tensor:
    return _angles_at(layout, start + torch.arange(count) * _ANCHOR_TOKENS)[None]


@cache
def _codebook(quantizer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of the points of keys and of values, the scales of all bytes, and multipliers of states."""
    coefficients, multipliers = torch.zeros(_NUM_WIDTHS, 3), torch.zeros(_NUM_WIDTHS, dtype=torch.int64)
    own, count = QUANTIZERS[quantizer], len(QUANTIZERS[quantizer].distortions)
    coefficients[:count] = torch.tensor(own.coefficients)
    if quantizer == "trellis":
        multipliers[:count] = torch.tensor(own.multipliers)
    of_values = coefficients.clone()
    of_values[:count] *= own.gains()[:, None]
    return coefficients, of_values, scale_of(torch.arange(256)).contiguous(), multipliers


def _key_basis(basis: Basis, mean: torch.Tensor, layout: RotaryLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the basis that components are multiplied with, and the means `[1, H, D]`, by the channels of pairs."""
    own = _BASES.setdefault(basis, {})
    if layout not in own:
        channels = _pairs(layout)[0].flatten().long()
        count, has_channel = basis.num_components, channels >= 0
        channels = channels.clamp(min=0)
        vectors = basis.vectors[:, :count].float() * basis.steps[:, :count, None] / basis.factors[:, None]
        vectors = (vectors[:, :, channels] * has_channel).unflatten(2, (-1, _GROUP)).transpose(1, 2).contiguous()
        own[layout] = vectors, (mean[0].float()[:, channels] * has_channel).unflatten(1, (-1, 2)).contiguous()
    return own[layout]
