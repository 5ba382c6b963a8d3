"""Bases of a calibration: the Karhunen-Loeve transform, with errors weighted by a metric.

Components of states in the basis are uncorrelated, and so are their weighted errors: the energy of a component is its
variance times the cost of an error there. No other basis needs so few bits for the same error.

    token, less its mean -> channels times their factors -> components in the basis of its head,
    in standard deviations

Components without bits are the last ones, and are dropped. The basis and its inverse have eight bits a number. The
inverse is that of the rounded basis; a second step on the residual of the first components corrects the rounding of
the inverse itself. So rounding only makes the basis slightly worse than the best one.

Legend: B batch, H heads, T tokens, D head dim, K components that any head has bits for.
"""

import torch

from kvcache_plugins.formats.quantizer import BLOCK
from kvcache_plugins.formats.rotary import RotaryLayout
from kvcache_plugins.formats.rows import Basis, RowFormat


# Share of a metric's mean diagonal that every direction costs, also one that no text has shown
_LEAST_SHARE = 1e-4
# Least share of the largest energy of a head: a component that does not vary must not divide by zero
_LEAST_ENERGY = 1e-9
# Largest number in eight bits
_MOST = 127
# Times that a token's scale and codes are fitted to each other in the basis of a calibration, at most
_NUM_REFITS = 5


def basis_for_widths(
    factors: torch.Tensor, vectors: torch.Tensor, steps: torch.Tensor, widths: torch.Tensor
) -> tuple[Basis, torch.Tensor]:
    """
    Make the basis, with `factors`, `vectors` and `steps` of a `Basis`, of as many components as get bits by widths
    `[H, all N]`, which add up to the same in every head; and widths of these `[H, N]`.
    """
    count = max(int((widths > 0).sum(dim=1).max()), 1)
    inverse = _rounded_inverse(vectors)[:, : min(count * BLOCK, vectors.shape[1])]
    own = (each.contiguous() for each in (factors, vectors, steps, inverse))
    return Basis(*own), widths[:, :count].to(torch.uint8).contiguous()


def format_in_basis(mean: torch.Tensor, basis: Basis, widths: torch.Tensor, rope: RotaryLayout | None) -> RowFormat:
    """
    Make the format of a calibration from a mean `[H, D]`, float16, the results of `basis_for_widths`, and the rotary
    embedding of keys, which values do not have.
    """
    is_key = rope is not None
    return RowFormat(
        order=None,
        mean=mean[None].contiguous(),
        deviation=None,
        widths=widths[None],
        row_size=1 + int(widths[0].sum()),
        head_dim=mean.shape[1],
        is_weighted=is_key,
        rope=rope,
        basis=basis,
        by_energy=not is_key,
        num_refits=_NUM_REFITS,
    )


def karhunen_loeve(metric: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Find the basis of states with second moments `[H, D, D]` about the subtracted mean, where an error `e` costs
    `e @ metric @ e`; `metric` `[H, D, D]` is symmetric and positive.

    Returns:
        `torch.Tensor` of shape `[H, D, D]`, float64: rows of the basis by falling energy, each as long as one standard
        deviation of its component; and `torch.Tensor` of shape `[H, D]`, their energies.
    """
    metric, moments = metric.double(), moments.double()
    unit = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    root = torch.linalg.cholesky(metric + _LEAST_SHARE * mean.clamp(min=torch.finfo(metric.dtype).tiny) * unit)
    energies, directions = torch.linalg.eigh(root.mT @ moments @ root)
    energies, directions = energies.flip(-1), directions.flip(-1)
    energies = energies.clamp(min=_LEAST_ENERGY * energies[..., :1].clamp(min=torch.finfo(metric.dtype).tiny))
    basis = torch.linalg.solve_triangular(root.mT, directions, upper=True).mT
    return basis * energies.sqrt()[..., None], energies


def round_basis(basis: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Round a basis, whose rows `[H, D, D]` are as long as a standard deviation of their component, for channels that
    are multiplied by `factors` `[H, D]`, so that all have the same rounding error. Return `vectors` and `steps` of
    `Basis`.
    """
    scaled = basis.double() * factors.double()[:, None]
    steps = scaled.abs().amax(dim=-1) / _MOST
    rounded = (scaled / steps[:, :, None]).round().to(torch.int8).contiguous()
    return rounded, steps.float().clamp(min=torch.finfo(torch.float32).tiny)


def _rounded_inverse(basis: torch.Tensor) -> torch.Tensor:
    """Return columns of the inverses of matrices `[H, D, D]`, each in its own units, `[H, D, D]`, int8."""
    columns = torch.linalg.inv(basis.double()).mT
    return (columns * (_MOST / columns.abs().amax(dim=-1, keepdim=True))).round().to(torch.int8)
