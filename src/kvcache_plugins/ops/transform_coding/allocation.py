"""How many bits the channels of a head get: reverse waterfilling over blocks of channels of like energy.

The error of a channel is its energy times the distortion of its width. Bits go one by one to the block whose error
they lessen most, which is the best there is, as every further bit of a block lessens it by less.

Legend: B batch, H heads, N blocks.
"""

import torch

from .codebooks import DISTORTIONS


# Channels that share a width, so that a block of width w is w bytes
BLOCK = 8


def num_blocks(head_dim: int) -> int:
    """Blocks that the channels of a head take, the last one perhaps not full."""
    return -(-head_dim // BLOCK)


def allocate_widths(energies: torch.Tensor, total: int, distortions: tuple[float, ...] = DISTORTIONS) -> torch.Tensor:
    """
    Widths of blocks, so that the sum of `energy * distortion(width)` is least.

    Args:
        energies (`torch.Tensor` of shape `[B, H, N]`): summed energies of the blocks' channels.
        total (`int`): sum of a head's widths, at most the largest width for every block.
        distortions (`tuple[float, ...]`, *optional*): of a normal variable at all widths from 0 on.

    Returns:
        `torch.Tensor` of shape `[B, H, N]`, int64, 0 to the largest width.
    """
    errors = torch.tensor(distortions, device=energies.device, dtype=energies.dtype)
    # No block gets more than the most; of equals, as where nothing has energy, all get the same first
    gains = torch.cat([errors[:-1] - errors[1:], errors.new_full((1,), -1.0)])
    energies = energies.clamp(min=torch.finfo(energies.dtype).tiny)
    widths = torch.zeros(energies.shape, dtype=torch.int64, device=energies.device)
    for _ in range(total):
        best = (energies * gains[widths]).argmax(dim=-1, keepdim=True)
        widths.scatter_add_(-1, best, torch.ones_like(best))
    return widths


def expected_distortion(
    energies: torch.Tensor, widths: torch.Tensor, distortions: tuple[float, ...] = DISTORTIONS
) -> torch.Tensor:
    """The squared error to be expected of every head, `[B, H]`."""
    errors = torch.tensor(distortions, device=energies.device, dtype=energies.dtype)
    return (energies * errors[widths]).sum(dim=-1)


def even_widths(head_dim: int, total: int) -> list[int]:
    """The widths of blocks that all have the same energy: two neighbouring ones, the wider first."""
    count = num_blocks(head_dim)
    return [total // count + (block < total % count) for block in range(count)]
