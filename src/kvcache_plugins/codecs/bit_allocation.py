"""Bit allocation by reverse waterfilling over blocks of channels.

The error of a block is its energy times the distortion of its width. Each bit goes to the block whose error it reduces
most, which is optimal, as every further bit of a block reduces it by less.

Legend: B batch, H heads, D head dim, N blocks of eight channels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvcache_plugins.formats.quantizer import BLOCK


def order_dtype(head_dim: int) -> torch.dtype:
    """Return the dtype of the indices of a head's channels: bytes, as far as they count."""
    return torch.uint8 if head_dim <= 2**8 else torch.int16


def allocate_widths(energies: torch.Tensor, total: int, distortions: tuple[float, ...]) -> torch.Tensor:
    """
    Find widths of blocks `[B, H, N]`, int64, `total` in a head, that minimize the sum of `energy *
    distortion(width)`, given energies `[B, H, N]` and distortions of a normal variable at all widths from 0 on.
    """
    errors = torch.tensor(distortions, device=energies.device, dtype=energies.dtype)
    most = len(errors) - 1
    # Blocks of heads without energy are equal, and get bits in turn
    energies = energies.clamp(min=torch.finfo(energies.dtype).tiny)
    gains = (energies[..., None] * (errors[:-1] - errors[1:])).flatten(-2)  # [B, H, N * the largest width]
    blocks = gains.sort(dim=-1, descending=True, stable=True).indices[..., :total] // most
    widths = torch.zeros(energies.shape, dtype=torch.int64, device=energies.device)
    return widths.scatter_add_(-1, blocks, torch.ones_like(blocks))


def allocate_channels(
    energy: torch.Tensor, total: int, distortions: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Sort channels of energies `[..., D]`, the largest first. Return the expected squared error of every head `[...]`,
    the order as it is stored, and widths of blocks `[..., N]`.
    """
    energy, order = energy.sort(dim=-1, descending=True)
    by_block = F.pad(energy, (0, -energy.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    widths = allocate_widths(by_block, total, distortions)
    errors = (by_block * torch.tensor(distortions, device=energy.device, dtype=energy.dtype)[widths]).sum(dim=-1)
    return errors, order.to(order_dtype(order.shape[-1])), widths


def share_bytes(energies: Sequence[torch.Tensor], total: int, least: int, errors: tuple[float, ...]) -> list[int]:
    """
    Share `total` bytes, summed over heads, between sides of layers, given energies of their blocks `[H, N]`. Heads of
    a side get equally many, at least `least`. Minimize the sum of `energy * distortion(width)`, with distortions as
    in `allocate_widths`, and returns the bytes of a head of every side.
    """
    distortions = torch.tensor(errors, dtype=torch.float64, device="cpu")
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
    costs = torch.tensor([side.shape[0] for side in energies], dtype=torch.int64, device="cpu")[taken].cumsum(dim=0)
    counts: list[int] = torch.bincount(taken[costs <= total], minlength=len(energies)).tolist()
    return [max(count, least) for count in counts]
