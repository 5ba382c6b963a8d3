"""What TurboQuant rotates by, and the points that it rounds to: constants of a head dimension.

A coordinate of a random unit vector of D dimensions has the density `(1 - x^2)^((D - 3) / 2)`, nearly a normal one of
variance `1 / D`. Its Lloyd-Max quantizer is found on a fine grid: points are means of what is nearest to them.
"""

from functools import cache

import torch


# Points of the grid, and how far out it goes in standard deviations
_GRID, _SPAN = 2**16, 9.0
_MOST_ROUNDS = 5000
_SEED = 0


@cache
def random_rotation(dim: int, device: torch.device) -> torch.Tensor:
    """A random orthogonal matrix `[dim, dim]`, float32, always the same; brought to a device once."""
    with torch.inference_mode(False):
        triangular = _gaussian(dim, _SEED)
        matrix, upper = torch.linalg.qr(triangular)
        # So that it is distributed evenly over all rotations
        return (matrix * upper.diagonal().sign()).float().to(device)


@cache
def random_projection(dim: int, device: torch.device) -> torch.Tensor:
    """A matrix `[dim, dim]` of independent normal variables, float32, always the same."""
    with torch.inference_mode(False):
        return _gaussian(dim, _SEED + 1).float().to(device)


def _gaussian(dim: int, seed: int) -> torch.Tensor:
    return torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@cache
def points_on_sphere(dim: int, nbits: int, device: torch.device) -> torch.Tensor:
    """The Lloyd-Max points of a coordinate of random unit vectors, in increasing order, `[2^nbits]`, float32."""
    with torch.inference_mode(False):
        return _lloyd_max(dim, nbits).float().to(device)


@cache
def bounds_on_sphere(dim: int, nbits: int, device: torch.device) -> torch.Tensor:
    """The bounds between those points, `[2^nbits - 1]`."""
    with torch.inference_mode(False):
        points = _lloyd_max(dim, nbits)
        return ((points[1:] + points[:-1]) / 2).float().to(device)


@cache
def _lloyd_max(dim: int, nbits: int) -> torch.Tensor:
    span = min(1.0, _SPAN * dim**-0.5)
    grid = span * ((2 * torch.arange(_GRID, dtype=torch.float64) + 1) / _GRID - 1)
    logarithm = (dim - 3) / 2 * torch.log1p(-grid * grid)
    density = (logarithm - logarithm.amax()).exp()
    # Where there are many points, the best are as dense as the cube root of the density
    shares = density.pow(1 / 3).cumsum(0)
    shares = shares / shares[-1]
    points = grid[torch.searchsorted(shares, (torch.arange(2**nbits, dtype=torch.float64) + 0.5) / 2**nbits)]
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
