"""Bases in which keys or values are worth coding: the Karhunen-Loeve transform, where errors count by a metric.

Components of states in the basis are uncorrelated, and their errors do not add up in each other: the energy of a
component is its variance times what an error there costs. No other basis needs so few bits for the same error.

Legend: H heads, D head dim.
"""

import torch


# Of a metric's mean diagonal: what keeps directions that nothing was seen of from being free
_LEAST_SHARE = 1e-4
# Of the largest energy of a head: a component that does not vary must not divide by zero
_LEAST_ENERGY = 1e-9


def karhunen_loeve(metric: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The basis of states of which an error `e` costs `e @ metric @ e`.

    Args:
        metric (`torch.Tensor` of shape `[H, D, D]`): symmetric and positive, what errors cost.
        moments (`torch.Tensor` of shape `[H, D, D]`): second moments of the states, about whatever is taken off them.

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
