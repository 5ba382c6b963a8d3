"""Low-rank approximation by power iteration (PowerSGD), batched over heads, sequences and chunks.

`R ~ A B^T` with `R` `[..., num_tokens, head_dim]`, `A` `[..., num_tokens, rank]` and `B` `[..., head_dim, rank]`. A
library SVD would be exact and slow; three iterations come within a few per cent of it. The starting matrix is the same
for every head and sequence, so the result of one sequence does not depend on others of its batch, and rows of
zeros (padding) change nothing.
"""

from functools import cache

import torch


_EPSILON = 1e-30


@cache
def starting_matrix(num_rows: int, rank: int, device: torch.device) -> torch.Tensor:
    """Make the starting matrix of every power iteration, `[num_rows, rank]`, float32; moved to a device once."""
    # Made in inference mode it could never be part of a graph
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(num_rows, rank, generator=generator, dtype=torch.float32, device="cpu").to(device)


def orthonormalize(matrix: torch.Tensor) -> torch.Tensor:
    """
    Return orthonormal columns spanning those of `matrix` `[..., num_rows, rank]`, by Gram-Schmidt done twice.

    A column that depends on the ones before it becomes zero, where a library QR would fill in an arbitrary direction,
    and rows of zeros stay zero.
    """
    columns: list[torch.Tensor] = []
    for column in matrix.unbind(dim=-1):
        norm_before = column.norm(dim=-1, keepdim=True)
        if columns:
            basis = torch.stack(columns, dim=-1)
            for _ in range(2):
                column = column - (basis @ (basis.transpose(-1, -2) @ column.unsqueeze(-1))).squeeze(-1)
        norm = column.norm(dim=-1, keepdim=True)
        independent = norm > 1e-6 * norm_before
        columns.append(torch.where(independent, column / norm.clamp(min=_EPSILON), 0))
    return torch.stack(columns, dim=-1)


def power_iteration(residual: torch.Tensor, rank: int, num_iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Approximate `residual` `[..., num_tokens, head_dim]`, float32, by `a @ b.mT` of a rank of at most the lesser size.
    Factors are orthonormalized in the last iteration only, as in the paper.

    Returns:
        `a` of shape `[..., num_tokens, rank]` with orthonormal columns, and `b` of shape `[..., head_dim, rank]`.
    """
    b = starting_matrix(residual.shape[-1], rank, residual.device).to(residual.dtype)
    b = b.expand(*residual.shape[:-2], *b.shape)
    transposed = residual.transpose(-1, -2)
    for iteration in range(num_iterations):
        if iteration == num_iterations - 1:
            b = orthonormalize(b)
            a = orthonormalize(residual @ b)
        else:
            # Scaled so that repeated products of a large residual stay in range; directions are unchanged
            a = residual @ b
            a = a / a.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
        b = transposed @ a
    return a, b
