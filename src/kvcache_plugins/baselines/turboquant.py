"""TurboQuant's bytes of a token of a head: its norm, and its direction after a random rotation.

    [ norm, float16 | codes of the rotated unit vector | norm of the residual, float16 | signs of its projection ]

The last two are for the residual alone. A coordinate of a random unit vector of D dimensions has the density
`(1 - x^2)^((D - 3) / 2)`, nearly a normal one of variance `1 / D`. Its Lloyd-Max quantizer is computed on a fine grid:
every level is the mean of the values nearest to it.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from kvcache_plugins.formats.bits import bytes_of_halves, halves_of_bytes, pack, packed_size, unpack
from kvcache_plugins.formats.hadamard import multiply


_HALF_BYTES = 2
# Points of the grid, and its extent in standard deviations
_GRID = 2**16
_SPAN = 9.0
_MAX_ROUNDS = 5000
_SEED = 0


@dataclass(frozen=True, slots=True)
class TurboQuantCoder:
    """
    Coder of keys or values; see `TurboQuantCache`.

    Attributes:
        head_dim (`int`): D.
        nbits (`int`): bits of a channel, including the one of the residual's signs.
        residual (`bool`, *optional*, defaults to `False`): use one of the bits for the residual.
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
        shared = constants(self.head_dim, self.code_nbits, states.device)
        rotated = multiply(states, shared.rotation)
        norms = rotated.norm(dim=-1, keepdim=True)
        unit = rotated / norms.clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.bucketize(unit, shared.bounds)
        parts = [bytes_of_halves(norms), pack(codes.to(torch.uint8), self.code_nbits)]
        if self.residual:
            rest = unit - shared.levels[codes]
            is_positive = multiply(rest, shared.projection) >= 0
            parts += [bytes_of_halves(rest.norm(dim=-1, keepdim=True)), pack(is_positive.to(torch.uint8), 1)]
        return torch.cat(parts, dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        shared = constants(self.head_dim, self.code_nbits, rows.device)
        size = packed_size(self.head_dim, self.code_nbits)
        codes = unpack(rows[..., _HALF_BYTES : _HALF_BYTES + size], self.code_nbits, self.head_dim)
        unit = shared.levels[codes.long()]
        if self.residual:
            rest = rows[..., _HALF_BYTES + size :]
            signs = 2 * unpack(rest[..., _HALF_BYTES:], 1, self.head_dim).float() - 1
            # The signs of a projection onto normal variables give an unbiased estimate
            factor = halves_of_bytes(rest[..., :_HALF_BYTES]) * (math.sqrt(math.pi / 2) / self.head_dim)
            unit = unit + factor * multiply(signs, shared.projection.T)
        rotated = halves_of_bytes(rows[..., :_HALF_BYTES]) * unit
        return multiply(rotated, shared.rotation.T)


class Constants(NamedTuple):
    """
    Constants of all heads of a dimension, in float32.

    Attributes:
        rotation (`torch.Tensor` of shape `[D, D]`): random orthogonal matrix.
        projection (`torch.Tensor` of shape `[D, D]`): independent normal variables, for the residual.
        levels (`torch.Tensor` of shape `[2^nbits]`): Lloyd-Max levels of a coordinate, increasing.
        bounds (`torch.Tensor` of shape `[2^nbits - 1]`): bounds between them.
    """

    rotation: torch.Tensor
    projection: torch.Tensor
    levels: torch.Tensor
    bounds: torch.Tensor


@cache
def constants(dim: int, nbits: int, device: torch.device) -> Constants:
    """Return the constants of heads of `dim` channels with `nbits` bits a code: the same ones at every call."""
    if device.type != "cpu":
        on_host = constants(dim, nbits, torch.device("cpu"))
        return Constants(*(each.to(device) for each in on_host))
    with torch.inference_mode(False):
        matrix, upper = torch.linalg.qr(_gaussian(dim, _SEED))
        levels = _lloyd_max(dim, nbits)
        return Constants(
            # The signs make all rotations equally likely
            rotation=(matrix * upper.diagonal().sign()).float(),
            projection=_gaussian(dim, _SEED + 1).float(),
            levels=levels.float(),
            bounds=((levels[1:] + levels[:-1]) / 2).float(),
        )


def _gaussian(dim: int, seed: int) -> torch.Tensor:
    return torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")


def _lloyd_max(dim: int, nbits: int) -> torch.Tensor:
    """Return the Lloyd-Max levels of a coordinate of a random unit vector, increasing, float64."""
    span = min(1.0, _SPAN * dim**-0.5)
    grid = span * ((2 * torch.arange(_GRID, dtype=torch.float64, device="cpu") + 1) / _GRID - 1)
    logarithm = (dim - 3) / 2 * torch.log1p(-grid * grid)
    density = (logarithm - logarithm.amax()).exp()
    # Initial levels: many optimal levels are as dense as the cube root of the density
    shares = density.pow(1 / 3).cumsum(0)
    shares = shares / shares[-1]
    halfway = (torch.arange(2**nbits, dtype=torch.float64, device="cpu") + 0.5) / 2**nbits
    levels = grid[torch.searchsorted(shares, halfway)]
    mass = torch.cat([density.new_zeros(1), density.cumsum(0)])
    moment = torch.cat([density.new_zeros(1), (density * grid).cumsum(0)])
    for _ in range(_MAX_ROUNDS):
        bounds = torch.searchsorted(grid, (levels[1:] + levels[:-1]) / 2)
        edges = torch.cat([bounds.new_zeros(1), bounds, bounds.new_full((1,), _GRID)])
        means = moment[edges].diff() / mass[edges].diff()
        if bool((means == levels).all()):
            break
        levels = means
    return levels
