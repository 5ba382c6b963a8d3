"""Codes of different widths packed into rows of bytes.

A row is a head's token: first a byte that is its scale, then a block of eight channels after the other. A block of
width w is w bytes, and holds eight codes of w bits one after another, lowest bits first. All heads have rows of the
same size, so rows are one tensor, though blocks stand at other places in every head.

Legend: B batch, H heads, T tokens, N blocks, R bytes of a row.
"""

import torch

from .allocation import BLOCK


def block_offsets(widths: torch.Tensor) -> torch.Tensor:
    """The first byte of every block, `[B, H, N]`, of widths `[B, H, N]`."""
    widths = widths.long()
    return 1 + widths.cumsum(dim=-1) - widths


def _shifts(widths: torch.Tensor) -> torch.Tensor:
    """Where the codes of a block begin, in bits, `[B, H, 1, N, 8]`."""
    return (widths.long()[..., None] * torch.arange(BLOCK, device=widths.device))[:, :, None]


def pack_rows(codes: torch.Tensor, scales: torch.Tensor, widths: torch.Tensor, row_size: int) -> torch.Tensor:
    """
    Rows of bytes.

    Args:
        codes (`torch.Tensor` of shape `[B, H, T, N, 8]`, int64): codes, below `2^width`.
        scales (`torch.Tensor` of shape `[B, H, T, 1]`, uint8): the first byte.
        widths (`torch.Tensor` of shape `[B, H, N]`): bits of a block's codes.
        row_size (`int`): R.

    Returns:
        `torch.Tensor` of shape `[B, H, T, R]`, uint8.
    """
    blocks = (codes << _shifts(widths)).sum(dim=-1)
    blocks_as_bytes = blocks.view(torch.uint8).unflatten(-1, (-1, BLOCK)).flatten(-2)
    # Byte r of a row is byte `r - offset` of the last block that begins at or before it
    places = torch.arange(1, row_size, device=codes.device).expand(*widths.shape[:2], -1).contiguous()
    offsets = block_offsets(widths)
    block = torch.searchsorted(offsets.contiguous(), places, right=True) - 1
    source = block * BLOCK + places - offsets.gather(-1, block)
    index = source[:, :, None].expand(-1, -1, codes.shape[2], -1)
    return torch.cat([scales, blocks_as_bytes.gather(3, index)], dim=3)


def unpack_rows(rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """The codes `[B, H, T, N, 8]`, int64, of rows; the arguments are those of `pack_rows`."""
    lanes = torch.arange(BLOCK, device=rows.device)
    places = block_offsets(widths)[..., None] + lanes
    in_block = lanes < widths[..., None]
    places = places.clamp(max=rows.shape[3] - 1).flatten(2)[:, :, None].expand(-1, -1, rows.shape[2], -1)
    blocks = rows.gather(3, places) * in_block.flatten(2)[:, :, None]
    blocks = blocks.unflatten(3, (-1, BLOCK)).contiguous().view(torch.int64)
    masks = (1 << widths.long()) - 1
    return (blocks >> _shifts(widths)) & masks[:, :, None, :, None]
