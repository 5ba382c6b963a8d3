"""Bases: components are uncorrelated, and the costs of their errors are the energies."""

import pytest
import torch

from kvcache_plugins.codecs.basis import karhunen_loeve


def spread(head_dim: int) -> torch.Tensor:
    """A symmetric positive matrix of three heads."""
    roots = torch.randn(3, head_dim, head_dim, dtype=torch.float64) * torch.logspace(0, -2, head_dim).double()
    return roots @ roots.mT


@pytest.mark.parametrize("head_dim", [1, 20, 64])
def test_components_are_uncorrelated_and_their_errors_add_up(head_dim):
    metric, moments = spread(head_dim), spread(head_dim)
    basis, energies = karhunen_loeve(metric, moments)
    assert bool((energies[:, :-1] >= energies[:, 1:]).all())
    forward = torch.linalg.inv(basis)
    is_known = energies > 1e-7 * energies[:, :1]
    variances = (forward.mT @ moments @ forward).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(variances[is_known], torch.ones_like(variances[is_known]), rtol=0, atol=1e-3)
    costs = basis @ metric @ basis.mT
    # Up to the share of the unit matrix that the metric has had added
    relative = (costs - torch.diag_embed(energies)) / energies[:, :, None].sqrt() / energies[:, None].sqrt()
    relative = relative.masked_fill(~(is_known[:, :, None] & is_known[:, None]), 0)
    assert float(relative[:, : head_dim // 4 + 1, : head_dim // 4 + 1].abs().max()) < 0.01


def test_constant_channels_do_not_divide_by_zero():
    for metric, moments in ((spread(8), torch.zeros(3, 8, 8)), (torch.zeros(3, 8, 8), spread(8))):
        basis, energies = karhunen_loeve(metric, moments)
        assert bool(basis.isfinite().all()) and bool((energies > 0).all())
        assert bool(torch.linalg.inv(basis).isfinite().all())
