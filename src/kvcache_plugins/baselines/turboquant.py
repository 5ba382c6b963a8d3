"""How TurboQuant turns a token of a head into bytes: its norm, and its direction after a random rotation.

    [ norm, float16 | codes of the rotated unit vector | norm of the residual, float16 | signs of its projection ]

the last two with the residual only. A coordinate of a random unit vector of D dimensions has the density
`(1 - x^2)^((D - 3) / 2)`, nearly a normal one of variance `1 / D`. Its Lloyd-Max quantizer is found on a fine grid:
points are means of what is nearest to them.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch

from kvcache_plugins.formats.bits import bytes_of_halves, halves_of_bytes, pack, packed_size, unpack
from kvcache_plugins.formats.hadamard import multiply


_HALF_BYTES = 2
# Points of the grid, and how far out it goes in standard deviations
_GRID, _SPAN = 2**16, 9.0
_MOST_ROUNDS = 5000
_SEED = 0


@dataclass(frozen=True, slots=True)
class TurboQuantCoder:
    """
    Codes keys or values; see `TurboQuantCache`.

    Attributes:
        head_dim (`int`): D.
        nbits (`int`): bits a channel, that of the residual's signs among them.
        residual (`bool`, *optional*, defaults to `False`): whether one of them is for the residual.
    """

    head_dim: int
    nbits: int
    residual: bool = False

    @property
    def code_nbits(self) -> int:
        """Bits of a code."""
        return self.nbits - self.residual

    @property
    def row_size(self) -> int:
        rest = _HALF_BYTES + packed_size(self.head_dim, 1) if self.residual else 0
        return _HALF_BYTES + packed_size(self.head_dim, self.code_nbits) + rest

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        rotated = multiply(states, random_rotation(self.head_dim, states.device))
        norms = rotated.norm(dim=-1, keepdim=True)
        unit = rotated / norms.clamp(min=torch.finfo(torch.float32).tiny)
        points, bounds = codebook(self.head_dim, self.code_nbits, unit.device)
        codes = torch.bucketize(unit, bounds)
        parts = [bytes_of_halves(norms), pack(codes.to(torch.uint8), self.code_nbits)]
        if self.residual:
            rest = unit - points[codes]
            is_positive = multiply(rest, random_projection(self.head_dim, unit.device)) >= 0
            parts += [bytes_of_halves(rest.norm(dim=-1, keepdim=True)), pack(is_positive.to(torch.uint8), 1)]
        return torch.cat(parts, dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        size = packed_size(self.head_dim, self.code_nbits)
        codes = unpack(rows[..., _HALF_BYTES : _HALF_BYTES + size], self.code_nbits, self.head_dim)
        unit = codebook(self.head_dim, self.code_nbits, rows.device)[0][codes.long()]
        if self.residual:
            rest = rows[..., _HALF_BYTES + size :]
            signs = 2 * unpack(rest[..., _HALF_BYTES:], 1, self.head_dim).float() - 1
            # Of a projection onto normal variables the signs alone give an unbiased estimate
            factor = halves_of_bytes(rest[..., :_HALF_BYTES]) * (math.sqrt(math.pi / 2) / self.head_dim)
            unit = unit + factor * multiply(signs, random_projection(self.head_dim, rows.device).T)
        rotated = halves_of_bytes(rows[..., :_HALF_BYTES]) * unit
        return multiply(rotated, random_rotation(self.head_dim, rows.device).T)


@cache
def random_rotation(dim: int, device: torch.device) -> torch.Tensor:
    """Makes a random orthogonal matrix `[dim, dim]`, float32, always the same; brought to a device once."""
    with torch.inference_mode(False):
        matrix, upper = torch.linalg.qr(_gaussian(dim, _SEED))
        # So that it is distributed evenly over all rotations
        return (matrix * upper.diagonal().sign()).float().to(device)


@cache
def random_projection(dim: int, device: torch.device) -> torch.Tensor:
    """Makes a matrix `[dim, dim]` of independent normal variables, float32, always the same."""
    with torch.inference_mode(False):
        return _gaussian(dim, _SEED + 1).float().to(device)


def _gaussian(dim: int, seed: int) -> torch.Tensor:
    return torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")


@cache
def codebook(dim: int, nbits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Finds the Lloyd-Max points of a coordinate of random unit vectors, in increasing order, `[2^nbits]`, float32, and
    the bounds between them.
    """
    with torch.inference_mode(False):
        points = _lloyd_max(dim, nbits)
        return points.float().to(device), ((points[1:] + points[:-1]) / 2).float().to(device)


@cache
def _lloyd_max(dim: int, nbits: int) -> torch.Tensor:
    span = min(1.0, _SPAN * dim**-0.5)
    grid = span * ((2 * torch.arange(_GRID, dtype=torch.float64, device="cpu") + 1) / _GRID - 1)
    logarithm = (dim - 3) / 2 * torch.log1p(-grid * grid)
    density = (logarithm - logarithm.amax()).exp()
    # Where there are many points, the best are as dense as the cube root of the density
    shares = density.pow(1 / 3).cumsum(0)
    shares = shares / shares[-1]
    halfway = (torch.arange(2**nbits, dtype=torch.float64, device="cpu") + 0.5) / 2**nbits
    points = grid[torch.searchsorted(shares, halfway)]
    mass = torch.cat([density.new_zeros(1), density.cumsum(0)])
    moment = torch.cat([density.new_zeros(1), (density * grid).cumsum(0)])
    for _ in range(_MOST_ROUNDS):
        bounds = torch.searchsorted(grid, (points[1:] + points[:-1]) / 2)
        edges = torch.cat([bounds.new_zeros(1), bounds, bounds.new_full((1,), _GRID)])
        means = moment[edges].diff() / mass[edges].diff()
        if bool((means == points).all()):
            break
        points = means
    return points
