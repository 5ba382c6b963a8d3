"""Affine codes of OSCAR and SAW-INT4: groups of a token's rotated channels, each with a scale and a minimum.

[ scales, float16 | minima, float16 | codes ]
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.formats.bits import bytes_of_halves, halves_of_bytes, pack, packed_size, unpack
from kvcache_plugins.formats.hadamard import multiply, rotate


_GROUP_SIZE = 128
_HALF_BYTES = 2


@dataclass(frozen=True, eq=False, slots=True)
class AffineCoder:
    """
    Coder of keys or values.

    Attributes:
        head_dim (`int`): D.
        nbits (`int`): bits of a code.
        is_rotated (`bool`): True if a Hadamard matrix rotates the states first, see `formats.hadamard`.
        rotation (`torch.Tensor` of shape `[H, D, D]`, float32, *optional*): orthogonal matrices of a calibration that
            multiply the states instead.
        clip (`float`, *optional*, defaults to 1): quantile of a group's magnitudes that clips it.
    """

    head_dim: int
    nbits: int
    is_rotated: bool = False
    rotation: torch.Tensor | None = None
    clip: float = 1.0

    @property
    def group_size(self) -> int:
        """Number of channels that share a scale: 128, or all if 128 does not divide them."""
        return _GROUP_SIZE if self.head_dim % _GROUP_SIZE == 0 else self.head_dim

    @property
    def row_size(self) -> int:
        return 2 * self._scale_bytes + packed_size(self.head_dim, self.nbits)

    @property
    def _scale_bytes(self) -> int:
        return _HALF_BYTES * (self.head_dim // self.group_size)

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        groups = self._rotate(states).unflatten(-1, (-1, self.group_size))
        if self.clip < 1:
            rank = max(round(self.clip * self.group_size), 1)
            limit = groups.abs().kthvalue(rank, dim=-1, keepdim=True).values
            groups = groups.clamp(-limit, limit)
        minimum = groups.amin(dim=-1, keepdim=True).half().float()
        scale = ((groups.amax(dim=-1, keepdim=True) - minimum) / (2**self.nbits - 1)).half().float()
        codes = (groups - minimum) / torch.where(scale > 0, scale, 1)
        codes = codes.round().clamp(0, 2**self.nbits - 1).to(torch.uint8).flatten(-2)
        parts = [bytes_of_halves(scale[..., 0]), bytes_of_halves(minimum[..., 0]), pack(codes, self.nbits)]
        return torch.cat(parts, dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        size = self._scale_bytes
        scale, minimum = (halves_of_bytes(each)[..., None] for each in rows[..., : 2 * size].split(size, dim=-1))
        codes = unpack(rows[..., 2 * size :], self.nbits, self.head_dim).unflatten(-1, (-1, self.group_size))
        states = (codes.float() * scale + minimum).flatten(-2)
        return self._rotate(states, is_back=True)

    def _rotate(self, states: torch.Tensor, *, is_back: bool = False) -> torch.Tensor:
        """Rotate states `[..., D]`, or rotate them back."""
        if self.rotation is not None:
            rotation = self.rotation.to(states.device)
            return multiply(states, rotation.mT if is_back else rotation)
        # Sylvester's matrix is its own inverse
        return rotate(states) if self.is_rotated else states
