"""Power iteration comes close to the singular value decomposition, and does not see padding."""

import torch

from kvcache_plugins.codecs.low_rank import power_iteration


def test_close_to_singular_value_decomposition():
    # Singular values that fall off, as a residual's do
    left, _ = torch.linalg.qr(torch.randn(4, 256, 32))
    right, _ = torch.linalg.qr(torch.randn(4, 32, 32))
    matrix = left * (0.8 ** torch.arange(32)) @ right
    a, b = power_iteration(matrix, 4, 3)
    error = (matrix - a @ b.transpose(-1, -2)).norm(dim=(-2, -1))
    best = torch.linalg.svdvals(matrix)[:, 4:].norm(dim=-1)
    assert (error >= best * 0.9999).all()
    assert error.mean() <= 1.05 * best.mean()


def test_zero_rows_and_other_items_change_nothing():
    matrix = torch.randn(2, 40, 16)
    padded = torch.cat([torch.zeros(2, 9, 16), matrix], dim=1)
    a, b = power_iteration(matrix, 3, 3)
    padded_a, padded_b = power_iteration(padded, 3, 3)
    assert torch.equal(padded_a[:, :9], torch.zeros(2, 9, 3))
    assert torch.allclose(padded_a[:, 9:] @ padded_b.transpose(-1, -2), a @ b.transpose(-1, -2), atol=1e-5)
    alone_a, alone_b = power_iteration(matrix[1:], 3, 3)
    assert torch.allclose(alone_a @ alone_b.transpose(-1, -2), (a @ b.transpose(-1, -2))[1:], atol=1e-5)


def test_zero_and_huge_residuals_stay_finite():
    for matrix in (torch.zeros(1, 8, 4), torch.full((1, 8, 4), 1e15)):
        a, b = power_iteration(matrix, 2, 3)
        assert a.isfinite().all()
        assert b.isfinite().all()
