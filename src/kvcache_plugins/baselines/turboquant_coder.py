"""How TurboQuant turns a token of a head into bytes.

    [ norm, float16 | codes of the rotated unit vector | norm of the residual, float16 | signs of its projection ]

the last two with the residual only.
"""

import math
from dataclasses import dataclass

import torch

from kvcache_plugins.codecs.quantization import pack, packed_size, unpack
from kvcache_plugins.codecs.rotation import turn_by

from .sphere_codebooks import bounds_on_sphere, points_on_sphere, random_projection, random_rotation
from .token_coder import bytes_of_halves, halves_of_bytes


_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class TurboQuantCoder:
    """
    See `TurboQuantCache`.

    Attributes:
        head_dim (`int`): D.
        nbits (`int`): bits a channel, that of the residual's signs among them.
        residual (`bool`): whether one of them is for the residual.
    """

    head_dim: int
    nbits: int
    residual: bool

    @property
    def code_nbits(self) -> int:
        """Bits of a code."""
        return self.nbits - self.residual

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        return turn_by(states, random_rotation(self.head_dim, states.device))

    def rotate_back(self, states: torch.Tensor) -> torch.Tensor:
        return turn_by(states, random_rotation(self.head_dim, states.device).T)

    def encode(self, rotated: torch.Tensor) -> torch.Tensor:
        norms = rotated.norm(dim=-1, keepdim=True)
        unit = rotated / norms.clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.bucketize(unit, bounds_on_sphere(self.head_dim, self.code_nbits, unit.device))
        parts = [bytes_of_halves(norms), pack(codes.to(torch.uint8), self.code_nbits)]
        if self.residual:
            rest = unit - self._points(codes)
            is_positive = turn_by(rest, random_projection(self.head_dim, unit.device)) >= 0
            parts += [bytes_of_halves(rest.norm(dim=-1, keepdim=True)), pack(is_positive.to(torch.uint8), 1)]
        return torch.cat(parts, dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        size = packed_size(self.head_dim, self.code_nbits)
        codes = unpack(rows[..., _HALF_BYTES : _HALF_BYTES + size], self.code_nbits, self.head_dim)
        unit = self._points(codes)
        if self.residual:
            rest = rows[..., _HALF_BYTES + size :]
            signs = 2 * unpack(rest[..., _HALF_BYTES:], 1, self.head_dim).float() - 1
            # Of a projection onto normal variables the signs alone give an unbiased estimate
            factor = halves_of_bytes(rest[..., :_HALF_BYTES]) * (math.sqrt(math.pi / 2) / self.head_dim)
            unit = unit + factor * turn_by(signs, random_projection(self.head_dim, rows.device).T)
        return halves_of_bytes(rows[..., :_HALF_BYTES]) * unit

    def _points(self, codes: torch.Tensor) -> torch.Tensor:
        return points_on_sphere(self.head_dim, self.code_nbits, codes.device)[codes.long()]
