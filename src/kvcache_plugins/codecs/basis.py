"""Bases of a calibration, in which states are worth coding: the Karhunen-Loeve transform, errors counted by a metric.

Components of states in the basis are uncorrelated, and their errors do not add up in each other: the energy of a
component is its variance times what an error there costs. No other basis needs so few bits for the same error.

    token, its mean taken off -> channels times their factors -> components in the basis of its head,
    in standard deviations

Components without bits vanish, in the order of the basis the last ones. The basis and its inverse stand in eight bits
a number. The inverse is that of the rounded basis, and what it lost when it was rounded itself is made good by a
second look, at what the first components leave. So all that rounding does is that the basis is a little beside the
best one.

Legend: B batch, H heads, T tokens, D head dim, K components that any head has bits for.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from kvcache_plugins.triton_kernels.stored_format import RowBasis

from .quantizer import BLOCK


# Of a metric's mean diagonal: what keeps directions that nothing was seen of from being free
_LEAST_SHARE = 1e-4
# Of the largest energy of a head: a component that does not vary must not divide by zero
_LEAST_ENERGY = 1e-9
# Of a number in eight bits
_MOST = 127


@dataclass(frozen=True, eq=False)
class Basis(RowBasis):
    """A basis for every head, and states in it."""

    @classmethod
    def for_widths(
        cls, factors: torch.Tensor, vectors: torch.Tensor, steps: torch.Tensor, widths: torch.Tensor
    ) -> "tuple[Basis, torch.Tensor]":
        """
        Makes the basis, with `factors`, `vectors` and `steps` of a `RowBasis`, of as many components as get bits by
        widths `[H, all N]`, which add up to the same in every head; and widths of these `[H, N]`.
        """
        count = max(int((widths > 0).sum(dim=1).max()), 1)
        inverse = _rounded_inverse(vectors)[:, : min(count * BLOCK, vectors.shape[1])]
        own = (each.contiguous() for each in (factors, vectors, steps, inverse))
        return cls(*own), widths[:, :count].to(torch.uint8).contiguous()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Lists everything stored."""
        yield from vars(self).values()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Basis":
        """Returns the basis with `function` applied to every tensor."""
        return Basis(*map(function, self.tensors()))

    def components(self, states: torch.Tensor) -> torch.Tensor:
        """Returns components `[B, H, T, K]` of states `[B, H, T, D]`, float32, whose mean has been taken off."""
        basis, inverse = self._matrices()
        scaled = states * self.factors[:, None]
        components = _product(scaled, inverse)
        return components + _product(scaled - _product(components, basis), inverse)

    def states(self, components: torch.Tensor) -> torch.Tensor:
        """Returns states `[B, H, T, D]`, less their mean, of components `[B, H, T, K]`."""
        return _product(components, self._matrices()[0]) / self.factors[:, None]

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """From components to channels times their factors `[H, K, D]`, and back `[H, D, K]`, float32."""
        basis, inverse = self.vectors[:, : self.num_components].float(), self.inverse.float()
        steps = self.steps[:, : self.num_components, None]
        own = (basis * inverse).sum(dim=-1, keepdim=True)
        return basis * steps, (inverse / (own * steps)).mT


def karhunen_loeve(metric: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Finds the basis of states of second moments `[H, D, D]`, about whatever is taken off them, of which an error `e`
    costs `e @ metric @ e`; `metric` `[H, D, D]` is symmetric and positive.

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
    Rounds a basis, whose rows `[H, D, D]` are as long as a standard deviation of their component, for channels that
    are multiplied by `factors` `[H, D]`: what rounding loses is then the same in all of them. Returns `vectors` and
    `steps` of `Basis`.
    """
    scaled = basis.double() * factors.double()[:, None]
    steps = scaled.abs().amax(dim=-1) / _MOST
    rounded = (scaled / steps[:, :, None]).round().to(torch.int8).contiguous()
    return rounded, steps.float().clamp(min=torch.finfo(torch.float32).tiny)


def _rounded_inverse(basis: torch.Tensor) -> torch.Tensor:
    """Columns of the inverses of matrices `[H, D, D]`, each in units of its own, `[H, D, D]`, int8."""
    columns = torch.linalg.inv(basis.double()).mT
    return (columns * (_MOST / columns.abs().amax(dim=-1, keepdim=True))).round().to(torch.int8)


def _product(states: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    # Autocast would round what is transformed to its dtype
    with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
        return states @ matrices
