"""Asymmetric uniform quantization of keys and values, and the packing of the codes.

Tensors come as chunks, `[batch_size, num_heads, num_chunks, chunk_length, head_dim]` (legend: B H M L D). A group of
values shares one step (`scale`) and one minimum (`zero`), both in float16; a value is `zero + scale * code`. Groups
lie along one of two axes:

- `"channel"`: `group_size` consecutive tokens of one channel of one head (`None`: all tokens of the chunk);
- `"token"`: `group_size` consecutive channels of one token of one head (`None`: all channels of all heads of the
  token).

Codes are chosen against the *stored* float16 scale and zero, so that rounding those adds no second error.

Packing is by slabs, not interleaved: at 2 bits, byte `j` of a token holds channels `j`, `j + D/4`, `j + D/2`,
`j + 3D/4`. One shift and one mask then give `D/4` channels that lie side by side, for PyTorch and for a GPU alike.
3 bits are a 2-bit plane followed by a 1-bit plane, so that nothing is wasted.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


# Of GEAR; other widths can be packed too
SUPPORTED_NBITS = (2, 3, 4, 8)
# Planes of each width, lowest bits first: (bits in the plane, shift of the plane within the code)
_PLANES = {
    1: ((1, 0),),
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    8: ((8, 0),),
}
# Mean errors whose squares are such a share of the errors' own are no accident, of as many tokens
_SHARED, _LEAST_SPREAD = 0.25, 16
# What thresholds go on by from token to token, and from channel to channel: the golden ratio spreads them evenly
_TOKEN_TURN, _CHANNEL_TURN = 0.6180339887498949, 0.7548776662466927
# Of everything that is stored but codes and indices
STORAGE_DTYPE = torch.float16


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which values share a scale and a zero: see the module's docstring."""

    axis: str
    group_size: int | None


def packed_size(head_dim: int, nbits: int) -> int:
    """Bytes that the codes of `head_dim` channels take."""
    return sum(-(-head_dim // (8 // width)) for width, _ in _PLANES[nbits])


def pack(codes: torch.Tensor, nbits: int) -> torch.Tensor:
    """Packs codes `[..., head_dim]` (`uint8`, below `2**nbits`) into bytes `[..., packed_size(head_dim, nbits)]`."""
    planes = []
    for width, shift in _PLANES[nbits]:
        per_byte = 8 // width
        plane = codes if width == nbits else (codes >> shift) & (2**width - 1)
        if plane.shape[-1] % per_byte:
            plane = F.pad(plane, (0, -plane.shape[-1] % per_byte))
        slabs = plane.unflatten(-1, (per_byte, -1)).unbind(-2)
        packed = slabs[0].clone() if per_byte == 1 else slabs[0] | (slabs[1] << width)
        for i in range(2, per_byte):
            packed |= slabs[i] << (i * width)
        planes.append(packed)
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack(packed: torch.Tensor, nbits: int, head_dim: int) -> torch.Tensor:
    """Unpacks bytes `[..., packed_size(head_dim, nbits)]` into codes `[..., head_dim]` (`uint8`)."""
    planes = []
    for width, shift in _PLANES[nbits]:
        per_byte, size = 8 // width, packed_size(head_dim, width)
        slabs = [(packed[..., :size] >> (i * width)) & (2**width - 1) for i in range(per_byte)]
        plane = slabs[0] if per_byte == 1 else torch.cat(slabs, dim=-1)
        planes.append(plane[..., :head_dim] << shift if shift else plane[..., :head_dim])
        packed = packed[..., size:]
    return planes[0] if len(planes) == 1 else planes[0] | planes[1]


def _by_group(states: torch.Tensor, grouping: Grouping) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Views states with the values of a group along dimensions of their own, and names those."""
    if grouping.axis == "channel":
        return states.unflatten(3, (-1, grouping.group_size or states.shape[3])), (4,)
    if grouping.group_size is None:
        return states, (1, 4)
    return states.unflatten(4, (-1, grouping.group_size)), (5,)


def expand_groups(grouped: torch.Tensor, grouping: Grouping, states_shape: torch.Size) -> torch.Tensor:
    """Repeats scales or zeros of groups to the shape of the states, as a view where possible."""
    if grouping.axis == "channel":
        size = states_shape[3] // grouped.shape[3]
        return grouped.unsqueeze(4).expand(-1, -1, -1, -1, size, -1).flatten(3, 4)
    if grouped.shape[4] == 1:
        return grouped.expand(-1, states_shape[1], -1, -1, states_shape[4])
    size = states_shape[4] // grouped.shape[4]
    return grouped.unsqueeze(5).expand(-1, -1, -1, -1, -1, size).flatten(4, 5)


def quantize(
    states: torch.Tensor,
    keep: torch.Tensor | None,
    nbits: int,
    grouping: Grouping,
    *,
    spread_errors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Quantizes chunks of keys or values.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, L, D]`, float32): what to quantize.
        keep (`torch.Tensor` of shape broadcastable to `states`, bool, *optional*): which values may widen the range of
            their group. The others (padding, outliers) are clamped into it.
        nbits (`int`): bits a code, one of 2, 3, 4, 8.
        grouping (`Grouping`): which values share a scale.
        spread_errors (`bool`, *optional*, defaults to `False`): whether tokens of a head that would all be rounded to
            the same side are rounded to both, so that their average is right.

    Returns:
        Codes (`uint8`, the shape of `states`), scale and zero (float16, `[B, H, M, groups, D]` or
        `[B, H or 1, M, L, groups]`), which are not finite where a group holds NaN or its range exceeds float16: see
        `are_in_range`.
    """
    grouped, dims = _by_group(states, grouping)
    if keep is None:
        low, high = grouped.amin(dim=dims, keepdim=True), grouped.amax(dim=dims, keepdim=True)
    else:
        kept = _by_group(keep.expand_as(states), grouping)[0]
        low = torch.where(kept, grouped, torch.inf).amin(dim=dims, keepdim=True)
        high = torch.where(kept, grouped, -torch.inf).amax(dim=dims, keepdim=True)
        # A group of which nothing is kept
        low, high = torch.where(low == torch.inf, 0, low), torch.where(high == -torch.inf, 0, high)
    levels = 2**nbits - 1
    zero = low.to(STORAGE_DTYPE)
    scale = ((high - zero.float()).clamp(min=0) / levels).to(STORAGE_DTYPE)
    # A constant group has scale 0 and code 0 throughout
    step = scale.float()
    numbers = (grouped - zero.float()).mul_(torch.where(step > 0, 1 / step, 0)).reshape(states.shape)
    codes = numbers.round()
    if spread_errors:
        codes = _spread(codes, numbers, keep)
    if len(dims) == 1:
        scale, zero = scale.squeeze(dims[0]), zero.squeeze(dims[0])
    return codes.clamp_(0, levels).to(torch.uint8), scale, zero


def _spread(codes: torch.Tensor, numbers: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """
    Rounds heads otherwise whose tokens would all be rounded to the same side, as where a text repeats a token.

    Attention averages over tokens, and so over their errors, unless they share them. Where a good part of the errors
    of a head is shared, its numbers are rounded up and down in turns, by how near they are: to the next number above a
    threshold of each token and channel, which are spread evenly. Thresholds are counted from the end of a chunk, where
    sequences of a batch end together.
    """
    length = codes.shape[3]
    if length < _LEAST_SPREAD:
        return codes
    errors = codes - numbers
    if keep is None:
        shared, each = errors.mean(dim=3), errors.square().mean(dim=3)
    else:
        errors.mul_(keep)
        count = keep.expand(*errors.shape[:4], -1).sum(dim=3).clamp(min=1)
        shared, each = errors.sum(dim=3) / count, errors.square().sum(dim=3) / count
    is_shared = shared.square().mean(dim=3) > _SHARED * each.mean(dim=3)
    if numbers.device.type == "cpu" and not bool(is_shared.any()):
        return codes
    tokens = torch.arange(length - 1, -1, -1, dtype=torch.float32, device=numbers.device)[:, None]
    channels = torch.arange(codes.shape[4], dtype=torch.float32, device=numbers.device)
    thresholds = (tokens * _TOKEN_TURN + channels * _CHANNEL_TURN).frac()
    return torch.where(is_shared[:, :, :, None, None], (numbers + thresholds).floor(), codes)


def are_in_range(*stored: torch.Tensor) -> torch.Tensor:
    """Tells whether all that is stored in floats is finite, `[]`, bool, on the device: for `check_range`."""
    return torch.stack([tensor.isfinite().all() for tensor in stored]).all()


def check_range(*in_range: torch.Tensor) -> None:
    """Raises a `ValueError` if `are_in_range` said `False` of anything, for which the host waits for the device."""
    if not bool(torch.stack(in_range).all()):
        raise ValueError(
            "the states exceed the range of float16 (65504), in which scales, zeros and corrections are stored"
        )


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    """Turns what `quantize` returned into float32 states again, contiguous."""
    states = codes.to(torch.float32, memory_format=torch.contiguous_format)
    states *= expand_groups(scale, grouping, states.shape)
    states += expand_groups(zero, grouping, states.shape)
    return states


def bytes_of_halves(numbers: torch.Tensor) -> torch.Tensor:
    """Stores `numbers` `[..., N]` in float16, as bytes `[..., 2 N]`; a `ValueError` if one is too large for that."""
    halves = numbers.half()
    if not halves.is_meta and not bool(halves.isfinite().all()):
        raise ValueError("keys or values are so large that their scale does not fit into float16 (65504)")
    return halves.contiguous().view(torch.uint8)


def halves_of_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Reads what `bytes_of_halves` stored, in float32."""
    return rows.contiguous().view(torch.float16).float()
