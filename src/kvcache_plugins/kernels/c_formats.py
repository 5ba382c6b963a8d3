"""Row formats, chunks of groups, rotary embeddings and bases as the C kernels read them.

C reads tensors of a format in place, and trusts only their sizes. Data of a model is made once: pairs of channels and
their angles, and bases of keys in the order in which C reads them. Structures of a format are kept as long as the
format.

Legend: B batch, H heads, D channels, K coefficients of a token, P pairs of channels, rounded up to 16.
"""

from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from kvcache_plugins.formats.bits import packed_size
from kvcache_plugins.formats.groups import QuantizedChunks, channel_bits, num_offsets
from kvcache_plugins.formats.hadamard import rotation_size
from kvcache_plugins.formats.quantizer import BLOCK, COEFFICIENTS, MAX_WIDTH, level_gains, level_tables
from kvcache_plugins.formats.rotary import RotaryLayout, channels_of
from kvcache_plugins.formats.rows import Basis, RowFormat, scale_of

from .c_structs import CONSTANTS, MAX_CHANNELS, TILE, Structure, make
from .library import level


# Least tiles of positions whose angles are computed: all layers share them
_LEAST_TILES = 64
# Channels of a basis that C sums up at a time, as floats and as words: see `rows.c`
_BASIS_CHANNELS, _WORD_CHANNELS = 4, 8
_NUM_WIDTHS = MAX_WIDTH + 1
# Index of the first bound of each depth of a search, and the number of bounds: see `coding.h`
_DEPTHS = (0, 16, 32, 48, 64, 80, 112)
_ALL_DEPTHS = 192
# Structures of what C reads in place
_DESCRIBED: "WeakKeyDictionary[RowFormat | QuantizedChunks, Structure]" = WeakKeyDictionary()
# Bases and means of keys by layout and level of instructions
_BASES: "WeakKeyDictionary[Basis, dict[tuple[RotaryLayout, str], dict[str, torch.Tensor]]]" = WeakKeyDictionary()


def c_format_of(row_format: RowFormat, batch_size: int, num_heads: int, head_dim: int) -> Structure:
    """Describe a format of rows of `batch_size` sequences; a `ValueError` if it is of other heads."""
    own = row_format.widths.shape[1], row_format.head_dim
    if own != (num_heads, head_dim):
        raise ValueError(f"`states` of {num_heads} heads of {head_dim}, a format of {own[0]} of {own[1]}")
    known = _DESCRIBED.get(row_format)
    if known is not None and known.batch == batch_size:
        return known
    described = make("RowFormat", **_format_fields(row_format, batch_size))
    if row_format.basis is None:
        for tensor in (row_format.order, row_format.mean, row_format.deviation, row_format.widths):
            # A copy would not see what is written into the tensor later
            if tensor is not None and not tensor.is_contiguous():
                return described
    _DESCRIBED[row_format] = described
    return described


def c_chunks_of(states: QuantizedChunks) -> Structure:
    """Describe one side of groups."""
    known = _DESCRIBED.get(states)
    if known is not None:
        return known
    if not all(tensor.is_contiguous() for _, tensor in states.named_tensors()):
        return make("QuantizedChunks", **_chunk_fields(states.map(torch.Tensor.contiguous)))
    described = make("QuantizedChunks", **_chunk_fields(states))
    _DESCRIBED[states] = described
    return described


def is_copied(stored: RowFormat | QuantizedChunks, described: Structure) -> bool:
    """Return true if the description of stored tensors has copies of them."""
    return _DESCRIBED.get(stored) is not described


def _format_fields(row_format: RowFormat, batch_size: int) -> dict[str, object]:
    num_heads = row_format.widths.shape[1]
    num_coefficients = row_format.num_coefficients
    widths, mean = row_format.widths, row_format.mean
    deviation = row_format.deviation
    fields: dict[str, object] = {
        "batch": batch_size,
        "heads": num_heads,
        "channels": row_format.head_dim,
        "num_coefficients": num_coefficients,
        "row_size": row_format.row_size,
        "bands": -(-num_coefficients // BLOCK),
        "is_weighted": row_format.is_weighted,
        "by_energy": row_format.by_energy,
        "num_refits": row_format.num_refits,
        "codebook": _codebook(row_format.is_weighted),
        "rotation_size": rotation_size(row_format.head_dim) if row_format.is_rotated else 1,
    }
    if row_format.order is not None:
        fields |= {"order": row_format.order.contiguous(), "order_size": row_format.order.element_size()}
    basis = row_format.basis
    if basis is not None:
        # A model's format is one for all sequences
        widths = widths.expand(batch_size, -1, -1)
        mean = None if mean is None else mean.expand(batch_size, -1, -1)
        fields |= {"basis": basis.vectors, "inverse": basis.inverse, "steps": basis.steps, "factors": basis.factors}
    if deviation is None:
        deviation = torch.ones(batch_size, num_heads, 1, dtype=torch.float16, device="cpu")
    fields["widths"] = widths.contiguous()
    fields["mean"] = None if mean is None else mean.contiguous()
    fields["deviation"] = deviation.contiguous()
    fields["num_deviations"] = num_coefficients if deviation.shape[2] > 1 else 1
    return fields


def _chunk_fields(states: QuantizedChunks) -> dict[str, object]:
    batch_size, num_heads, chunks, length, _ = states.codes.shape
    dim, scales = states.head_dim, states.scale.shape
    by_channel = states.axis == "channel"
    groups, most = (scales[3], length) if by_channel else (scales[4], dim)
    if scales[1] not in (1, num_heads) or groups == 0 or most % groups:
        raise ValueError(f"scales of shape {tuple(scales)} for {num_heads} heads, {length} tokens, {dim} channels")
    rows, columns = (groups, dim) if by_channel else (length, groups)
    fields: dict[str, object] = dict(states.named_tensors())
    if states.low_rank_a is not None:
        rank = states.low_rank_a.shape[4]
        if rank > MAX_CHANNELS:
            raise ValueError(f"low rank of shape {tuple(states.low_rank_a.shape)} for chunks of {length} tokens")
        fields["rank"] = rank
    if states.outlier_indices is not None:
        fields |= {"num_outliers": states.outlier_indices.shape[3], "num_offsets": num_offsets(length, num_heads)}
        fields |= {"is_wide": states.outlier_indices.dtype == torch.int32}
    fields |= {"dim": dim, "nbits": states.nbits, "row_size": packed_size(dim, states.nbits), "groups": groups}
    fields |= {"batch": batch_size, "heads": num_heads, "chunks": chunks, "chunk_length": length}
    fields |= {"by_channel": by_channel, "scale_heads": scales[1], "scale_rows": rows, "scale_columns": columns}
    fields |= {"rotation_size": rotation_size(dim) if states.is_rotated else 1, "channel_bits": channel_bits(dim)}
    return fields


@cache
def _codebook(is_weighted: bool) -> torch.Tensor:
    """Make a `Codebook` of `coding.h`."""
    with torch.inference_mode(False):
        coefficients = torch.zeros(_NUM_WIDTHS, 4, dtype=torch.float32, device="cpu")
        coefficients[:, :3] = torch.tensor(COEFFICIENTS, dtype=torch.float32, device="cpu")
        coefficients[:, 3] = 1 if is_weighted else level_gains()
        bounds = torch.zeros(_NUM_WIDTHS, _ALL_DEPTHS, dtype=torch.float32, device="cpu")
        in_order = level_tables(bounds.device).bounds
        for width in range(1, _NUM_WIDTHS):
            half = 2 ** (width - 1)
            bounds[width] = _by_depth(in_order[width, half : 2 * half - 1])
        halfway = torch.exp2((torch.arange(16, dtype=torch.float64, device="cpu") + 0.5) / 16).float()
        scale_bounds = _by_depth(halfway[:15])
        scale_bounds[15] = halfway[15]
        scales = scale_of(torch.arange(256, dtype=torch.int64, device="cpu"))
        return torch.cat([part.flatten() for part in (bounds, scale_bounds, scales, coefficients)])


def _by_depth(bounds: torch.Tensor) -> torch.Tensor:
    """Order bounds, one less than a power of two in number, as a binary search meets them."""
    depths = len(bounds).bit_length()
    placed = torch.zeros(_ALL_DEPTHS, dtype=torch.float32, device="cpu")
    for depth in range(depths):
        first = 2 ** (depths - 1 - depth)
        placed[_DEPTHS[depth] : _DEPTHS[depth] + 2**depth] = bounds[first - 1 :: 2 * first]
    return placed


def rotary_of(layout: RotaryLayout, stop: int) -> Structure:
    """Describe a rotary embedding of positions before `stop`, and many more; and as many below 0, for padding."""
    return _rotary(layout, max(2 ** (stop // TILE).bit_length(), _LEAST_TILES))


@cache
def _rotary(layout: RotaryLayout, tiles: int) -> Structure:
    with torch.inference_mode(False):
        pairs, num_rotated, num_pairs = _pairs(layout)
        fine = _angles_at(layout, pairs, torch.arange(TILE, dtype=torch.int64, device="cpu"))
        coarse = _angles_at(layout, pairs, TILE * torch.arange(tiles, dtype=torch.int64, device="cpu"))
        fine_by_pair = F.pad(fine.permute(2, 1, 0), (0, CONSTANTS["ANGLES"] - TILE)).contiguous()
    return make(
        "Rotary",
        num_rotated=num_rotated,
        num_pairs=num_pairs,
        padded_pairs=len(pairs),
        tiles=tiles,
        pairs=pairs,
        fine=fine,
        coarse=coarse,
        fine_by_pair=fine_by_pair,
    )


def _pairs(layout: RotaryLayout) -> tuple[torch.Tensor, int, int]:
    """Return pairs of channels `[P, 2]`, int32, -1 for none; and how many are rotated, and how many there are."""
    partners = channels_of(layout, torch.device("cpu"))[0].tolist()
    pairs = [[channel, other] for channel, other in enumerate(partners) if other > channel]
    num_rotated = len(pairs)
    alone = [channel for channel, other in enumerate(partners) if other == channel]
    # Channels that are not rotated share pairs whose angles are 0
    pairs += [[*alone[i : i + 2], -1][:2] for i in range(0, len(alone), 2)]
    padded = torch.tensor(pairs + [[-1, -1]] * (-len(pairs) % 16), dtype=torch.int32, device="cpu")
    return padded, num_rotated, len(pairs)


def _angles_at(layout: RotaryLayout, pairs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute cosines and signed sines of the first channel of pairs at positions, `[*positions.shape, 2, P]`."""
    channels = pairs[:, 0].long()
    frequencies = channels_of(layout, torch.device("cpu"))[1][channels.clamp(min=0)]
    angles = positions.double()[..., None] * torch.where(channels < 0, 0.0, frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-2).float()


def key_basis_fields(basis: Basis, mean: torch.Tensor, layout: RotaryLayout) -> dict[str, torch.Tensor]:
    """Return the fields of `RowPart` for keys in a basis, whose means are `[1, H, D]`, by the channels of pairs."""
    by_layout = _BASES.setdefault(basis, {})
    key = layout, level()
    if key not in by_layout:
        channels = _pairs(layout)[0].flatten().long()
        has_channel = channels >= 0
        channels = channels.clamp(min=0)
        make_fields = _basis_as_words if level() == "avx512" else _basis_as_floats
        fields = make_fields(basis, channels, has_channel)
        fields["key_mean"] = (mean[0].float()[:, channels] * has_channel).unflatten(1, (-1, 2)).contiguous()
        by_layout[key] = fields
    return by_layout[key]


def key_basis_sizes(num_coefficients: int, padded_pairs: int) -> dict[str, int]:
    """Return the sizes that the fields of a basis are declared with."""
    return {
        "num_coefficients": num_coefficients,
        "padded_pairs": padded_pairs,
        "basis_runs": 2 * padded_pairs // _BASIS_CHANNELS,
        "word_runs": 2 * padded_pairs // _WORD_CHANNELS,
        "word_lanes": -(-num_coefficients // 2),
    }


def _basis_as_floats(basis: Basis, channels: torch.Tensor, has_channel: torch.Tensor) -> dict[str, torch.Tensor]:
    count = basis.num_components
    steps = basis.steps[:, :count].contiguous()
    vectors = basis.vectors[:, :count].float() * steps[:, :, None] / basis.factors[:, None]
    vectors = (vectors[:, :, channels] * has_channel).unflatten(2, (-1, _BASIS_CHANNELS))
    return {"key_basis": vectors.transpose(1, 2).contiguous()}


def _basis_as_words(basis: Basis, channels: torch.Tensor, has_channel: torch.Tensor) -> dict[str, torch.Tensor]:
    """Put the codes of two components into the halves of a word."""
    count = basis.num_components
    codes = F.pad(basis.vectors[:, :count, channels] * has_channel, (0, 0, 0, count % 2)).int()
    words = (codes[:, ::2] & 0xFFFF) | (codes[:, 1::2] << 16)
    factors = (1 / basis.factors)[:, channels] * has_channel
    return {
        "key_words": words.unflatten(2, (-1, _WORD_CHANNELS)).transpose(1, 2).contiguous(),
        "key_steps": basis.steps[:, :count].contiguous(),
        "key_factors": factors.unflatten(1, (-1, 2)).contiguous(),
    }
