"""How many bits the channels of a head get: reverse waterfilling over blocks of channels of like energy.

The error of a channel is its energy times the distortion of its width. Bits go to the blocks whose errors they lessen
most, which is the best there is, as every further bit of a block lessens it by less.

Legend: B batch, H heads, N blocks.
"""

from collections.abc import Sequence

import torch


# Channels that share a width, so that a block of width w is w bytes
BLOCK = 8


def num_blocks(head_dim: int) -> int:
    """Blocks that the channels of a head take, the last one perhaps not full."""
    return -(-head_dim // BLOCK)


def allocate_widths(energies: torch.Tensor, total: int, distortions: tuple[float, ...]) -> torch.Tensor:
    """
    Widths of blocks, so that the sum of `energy * distortion(width)` is least.

    Args:
        energies (`torch.Tensor` of shape `[B, H, N]`): summed energies of the blocks' channels.
        total (`int`): sum of a head's widths, at most the largest width for every block.
        distortions (`tuple[float, ...]`): of a normal variable at all widths from 0 on.

    Returns:
        `torch.Tensor` of shape `[B, H, N]`, int64, 0 to the largest width.
    """
    errors = torch.tensor(distortions, device=energies.device, dtype=energies.dtype)
    most = len(errors) - 1
    # Of equals, as where nothing has energy, all get the same first
    energies = energies.clamp(min=torch.finfo(energies.dtype).tiny)
    gains = (energies[..., None] * (errors[:-1] - errors[1:])).flatten(-2)  # [B, H, N * the largest width]
    blocks = gains.sort(dim=-1, descending=True, stable=True).indices[..., :total] // most
    widths = torch.zeros(energies.shape, dtype=torch.int64, device=energies.device)
    return widths.scatter_add_(-1, blocks, torch.ones_like(blocks))


def expected_distortion(energies: torch.Tensor, widths: torch.Tensor, distortions: tuple[float, ...]) -> torch.Tensor:
    """The squared error to be expected of every head, `[B, H]`."""
    errors = torch.tensor(distortions, device=energies.device, dtype=energies.dtype)
    return (energies * errors[widths]).sum(dim=-1)


def even_widths(head_dim: int, total: int) -> list[int]:
    """The widths of blocks that all have the same energy: two neighbouring ones, the wider first."""
    count = num_blocks(head_dim)
    width, rest = divmod(total, count)
    return [width + 1] * rest + [width] * (count - rest)


def share_bytes(energies: Sequence[torch.Tensor], total: int, least: int, errors: tuple[float, ...]) -> list[int]:
    """
    Shares bytes between sides of layers, in each of which every head has as many, so that the sum of
    `energy * distortion(width)` over all is least.

    Args:
        energies (`Sequence[torch.Tensor]`): of every side, summed energies of the blocks' channels, `[H, N]`.
        total (`int`): bytes in all, those of every head counted.
        least (`int`): of a head, at least.
        errors (`tuple[float, ...]`): of a normal variable at all widths from 0 on.

    Returns:
        `list[int]`: of every side the bytes of a head.
    """
    distortions = torch.tensor(errors, dtype=torch.float64)
    gains, owners = [], []
    for number, side in enumerate(energies):
        each = side.double().cpu()[..., None] * (distortions[:-1] - distortions[1:])
        # The byte that a head takes next gains less than the one before, and so does its mean over heads
        ordered = each.flatten(1).sort(dim=1, descending=True).values.mean(dim=0)
        ordered[:least] = torch.inf
        gains.append(ordered)
        owners.append(torch.full_like(ordered, number, dtype=torch.int64))
    order = torch.cat(gains).argsort(descending=True, stable=True)
    taken = torch.cat(owners)[order]
    costs = torch.tensor([side.shape[0] for side in energies])[taken].cumsum(dim=0)
    counts: list[int] = torch.bincount(taken[costs <= total], minlength=len(energies)).tolist()
    return [max(count, least) for count in counts]
