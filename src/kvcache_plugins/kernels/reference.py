"""Encoding and decoding of rows in plain PyTorch: the reference that kernels are compared with. See `formats.rows`.

The stored scale is found after the codes. Scales of keys have the least error, where every channel counts by its
energy, which is proportional to `4^width`. Scales of values are `z.z / z.q`, which keeps the values' size: sums of
weighted values must not shrink with every token.

Legend: B batch, H heads, T tokens, D channels, K numbers that are coded, N blocks of eight, R bytes of a row.
"""

import torch
import torch.nn.functional as F

from kvcache_plugins.formats.hadamard import rotate
from kvcache_plugins.formats.positions import START, Positions
from kvcache_plugins.formats.quantizer import BLOCK, find_codes, level_gains, levels_of, pack_rows, unpack_rows
from kvcache_plugins.formats.rotary import RotaryLayout
from kvcache_plugins.formats.rows import (
    LAST_SCALE,
    LEAST_GAIN,
    SCALE_OFFSET,
    SCALE_STEPS,
    RowFormat,
    scale_of,
)


# Values that are encoded or decoded at a time: they fit into a CPU's caches, and take a GPU longer than their launch
# takes the host
_NUMBERS_ON_CPU, _NUMBERS_ON_GPU = 2**18, 2**23


def encode_rows(states: torch.Tensor, row_format: RowFormat, positions: Positions) -> torch.Tensor:
    """See `ops.encode_rows`."""
    if row_format.is_rotated and row_format.mean is not None:
        states = states.float() - row_format.mean.float()[:, :, None]
    parts = _split(_transform(states, row_format, positions), row_format)
    return torch.cat([_encode(part, row_format) for part in parts], dim=2)


def requantize_rows(rows: torch.Tensor, finer: RowFormat, row_format: RowFormat) -> torch.Tensor:
    """See `ops.requantize_rows`."""
    return torch.cat([_encode(_decode(part, finer), row_format) for part in _split(rows, row_format)], dim=2)


def decode_rows(rows: torch.Tensor, row_format: RowFormat, positions: Positions | None) -> torch.Tensor:
    """See `ops.decode_rows`."""
    states = torch.cat([_decode(part, row_format) for part in _split(rows, row_format)], dim=2)
    states = rotate(states) if row_format.is_rotated else states
    if row_format.basis is not None:
        states = row_format.basis.states(states)
    if row_format.mean is not None:
        states = states + row_format.mean.float()[:, :, None]
    if row_format.rope is None or positions is None:
        return states
    return apply_rope(states, row_format.rope, positions)


def apply_rope(
    keys: torch.Tensor, layout: RotaryLayout, positions: Positions, *, inverse: bool = False
) -> torch.Tensor:
    """See `ops.apply_rope`."""
    if not layout.frequencies:
        return keys.float()
    cosines, sines = (each[:, None] for each in layout.angles(positions.of(keys.shape[2], keys.device)))
    return layout.rotate(keys.float(), cosines, -sines if inverse else sines)


def channel_moments(
    states: torch.Tensor, valid: torch.Tensor | None, layout: RotaryLayout | None, positions: Positions = START
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.channel_moments`."""
    count = states.shape[2] if valid is None else valid.sum(dim=1).clamp(min=1)[:, None, None]
    counts = torch.ones((), dtype=torch.bool, device=states.device) if valid is None else valid[:, None, :, None]
    states = states.float() if layout is None else apply_rope(states, layout, positions, inverse=True)
    mean = (torch.where(counts, states, 0).sum(dim=2, dtype=torch.float64) / count).float()
    squares = torch.where(counts, states - mean[:, :, None], 0).square_()
    return mean, (squares.sum(dim=2, dtype=torch.float64) / count).float()


def _transform(states: torch.Tensor, row_format: RowFormat, positions: Positions) -> torch.Tensor:
    """Return numbers `[B, H, T, K]`, float32, of states `[B, H, T, D]`, less the mean already if they are rotated."""
    layout = row_format.rope
    states = states.float() if layout is None else apply_rope(states, layout, positions, inverse=True)
    if row_format.is_rotated:
        return rotate(states)
    if row_format.mean is not None:
        states = states - row_format.mean.float()[:, :, None]
    return states if row_format.basis is None else row_format.basis.components(states)


def _split(tokens: torch.Tensor, row_format: RowFormat) -> tuple[torch.Tensor, ...]:
    batch_size, num_heads = tokens.shape[:2]
    most = _NUMBERS_ON_CPU if tokens.is_cpu else _NUMBERS_ON_GPU
    return tokens.split(max(most // (batch_size * num_heads * row_format.num_coefficients), 1), dim=2)


def _encode(numbers: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """Encode numbers `[B, H, T, K]` as rows."""
    widths = row_format.widths.expand(len(numbers), -1, -1)
    normal = _normalize(numbers, row_format)
    has_bits = (widths > 0).float()[:, :, None, :, None]
    count = (has_bits.sum(dim=(-1, -2), keepdim=True) * BLOCK).clamp(min=1)
    found, _ = _stored_scale(((normal * normal * has_bits).sum(dim=(-1, -2), keepdim=True) / count).sqrt())
    for number in range(1 + row_format.num_refits):
        scale = found
        codes = find_codes(normal / scale, widths)
        levels = _levels(codes, widths, row_format)
        found, stored = _stored_scale(_fitting_scale(normal, widths, levels, scale, row_format))
        # Checked only if it saves work: the host waits for a GPU
        if number < row_format.num_refits and bool((found == scale).all()):
            break
    return pack_rows(codes, stored.flatten(3), widths, row_format.row_size)


def _fitting_scale(
    normal: torch.Tensor, widths: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, row_format: RowFormat
) -> torch.Tensor:
    """Return the scale `[B, H, T, 1, 1]` for levels that were found with `scale`."""
    has_bits = (widths > 0).float()[:, :, None, :, None]
    # Channels that reverse waterfilling has given bits to have energies in inverse proportion to its distortions
    weights = has_bits * 4.0 ** widths.float()[:, :, None, :, None]
    if row_format.is_weighted:
        over, under = weights * normal * levels, weights * levels * levels
        return over.sum(dim=(-1, -2), keepdim=True) / under.sum(dim=(-1, -2), keepdim=True).clamp(min=1e-9)
    counted = weights * normal if row_format.by_energy else normal
    energy = (counted * normal).sum(dim=(-1, -2), keepdim=True)
    product = (counted * levels).sum(dim=(-1, -2), keepdim=True)
    return torch.where(product > LEAST_GAIN * energy / scale, energy / product, scale)


def _decode(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """Decode rows to numbers `[B, H, T, K]`."""
    widths = row_format.widths.expand(len(rows), -1, -1)
    codes = unpack_rows(rows, widths)
    levels = _levels(codes, widths, row_format).flatten(3)[..., : row_format.num_coefficients]
    if row_format.order is not None:
        order = row_format.order.long()[:, :, None].expand_as(levels)
        levels = torch.empty_like(levels).scatter_(3, order, levels)
    numbers = levels * scale_of(rows[..., :1])
    return numbers if row_format.deviation is None else numbers * row_format.deviation.float()[:, :, None]


def _normalize(numbers: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """Return numbers over their deviations in the order of the format, `[B, H, T, N, 8]`."""
    if row_format.deviation is not None:
        deviation = row_format.deviation.float()
        # A channel that does not vary is its mean
        numbers = numbers * torch.where(deviation > 0, 1 / deviation, 0)[:, :, None]
    if row_format.order is not None:
        numbers = numbers.gather(3, row_format.order.long()[:, :, None].expand_as(numbers))
    return F.pad(numbers, (0, -row_format.num_coefficients % BLOCK)).unflatten(3, (-1, BLOCK))


def _levels(codes: torch.Tensor, widths: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """Return the levels of codes `[B, H, T, N, 8]`, as large on average as the encoded values."""
    levels = levels_of(codes, widths)
    if row_format.is_weighted:
        return levels
    gains = level_gains().to(levels.device)
    return levels * gains[widths.long()][:, :, None, :, None]


def _stored_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a scale `[B, H, T, 1, 1]` after rounding, and the byte that it is stored as."""
    steps = (scale.clamp(min=1e-6).log2() * SCALE_STEPS).round() + SCALE_OFFSET
    stored = steps.nan_to_num(0).clamp(0, LAST_SCALE).to(torch.uint8)
    return scale_of(stored), stored
