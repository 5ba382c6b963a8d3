"""Packing of codes into bytes, and of numbers in halves.

Packing is by slabs, not interleaved: at 2 bits, byte `j` of a token holds channels `j`, `j + D/4`, `j + D/2`,
`j + 3D/4`. One shift and one mask then give `D/4` channels that lie side by side, for PyTorch and for a GPU alike.
3 bits are a 2-bit plane followed by a 1-bit plane, so that nothing is wasted.
"""

import torch
import torch.nn.functional as F


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


def packed_size(head_dim: int, nbits: int) -> int:
    """Bytes that the codes of `head_dim` channels take."""
    return sum(-(-head_dim // (8 // width)) for width, _ in _PLANES[nbits])


def pack(codes: torch.Tensor, nbits: int) -> torch.Tensor:
    """Pack codes `[..., head_dim]` (`uint8`, below `2**nbits`) into bytes `[..., packed_size(head_dim, nbits)]`."""
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
    """Unpack bytes `[..., packed_size(head_dim, nbits)]` into codes `[..., head_dim]` (`uint8`)."""
    planes = []
    for width, shift in _PLANES[nbits]:
        per_byte, size = 8 // width, packed_size(head_dim, width)
        slabs = [(packed[..., :size] >> (i * width)) & (2**width - 1) for i in range(per_byte)]
        plane = slabs[0] if per_byte == 1 else torch.cat(slabs, dim=-1)
        planes.append(plane[..., :head_dim] << shift if shift else plane[..., :head_dim])
        packed = packed[..., size:]
    return planes[0] if len(planes) == 1 else planes[0] | planes[1]


def bytes_of_halves(numbers: torch.Tensor) -> torch.Tensor:
    """Store `numbers` `[..., N]` in float16, as bytes `[..., 2 N]`; a `ValueError` if one is too large for that."""
    halves = numbers.half()
    if not halves.is_meta and not bool(halves.isfinite().all()):
        raise ValueError("keys or values are so large that their scale does not fit into float16 (65504)")
    return halves.contiguous().view(torch.uint8)


def halves_of_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Read the numbers that `bytes_of_halves` stored, in float32."""
    return rows.contiguous().view(torch.float16).float()
