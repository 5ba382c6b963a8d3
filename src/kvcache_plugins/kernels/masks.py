"""Columns of attention masks, for caches that attend to their tokens in pieces.

A mask is what `scaled_dot_product_attention` takes: boolean (`True` attends) or added to the scores, of up to four
dimensions that broadcast to `[batch_size, num_heads, num_queries, seq_len]`.
"""

import torch
import torch.nn.functional as F


def _full_rank(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return the mask with four dimensions and all its columns."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask.expand(*mask.shape[:3], length) if mask.shape[3] == 1 else mask


def slice_mask(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    """
    Return the columns from `start` to `stop`, with all four dimensions; nothing is hidden behind the last column of
    several. `None` if nothing is hidden at all.
    """
    if mask is None:
        return None
    mask = _full_rank(mask, stop)
    missing = stop - mask.shape[3]
    if missing <= 0:
        return mask[..., start:stop]
    if start >= mask.shape[3]:
        return None
    return F.pad(mask[..., start:], (0, missing), value=mask.dtype == torch.bool)


def mask_columns(
    mask: torch.Tensor | None, positions: torch.Tensor, batch_size: int, length: int
) -> torch.Tensor | None:
    """
    Return the columns at `positions` `[batch_size, columns]` of every sequence; positions beyond the first or the
    last column repeat that one.
    """
    if mask is None:
        return None
    mask = _full_rank(mask, length)
    mask = mask.expand(batch_size, *mask.shape[1:])
    index = positions.clamp(min=0, max=length - 1)[:, None, None, :]
    return mask.gather(3, index.expand(-1, *mask.shape[1:3], -1))


def hide_first(mask: torch.Tensor | None, count: int, length: int, device: torch.device) -> torch.Tensor:
    """Return `mask` of `length - count` columns with `count` hidden columns in front."""
    if mask is None:
        return (torch.arange(length, dtype=torch.int64, device=device) >= count)[None, None, None]
    return F.pad(mask, (count, 0), value=False if mask.dtype == torch.bool else -torch.inf)


def combine_masks(mask: torch.Tensor | None, allowed: torch.Tensor) -> torch.Tensor:
    """Return `mask` narrowed to the columns that are `allowed` `[batch_size, columns]`, bool."""
    allowed = allowed[:, None, None, :]
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)


def _sees_itself(mask: torch.Tensor, first_new: int, first_column: int) -> torch.Tensor:
    """Return for every new token, `[1 or B, tokens]`, whether it may attend to itself."""
    columns = _full_rank(mask, mask.shape[-1])[:, 0]
    itself = columns.diagonal(offset=first_new - first_column, dim1=-2, dim2=-1)
    return itself if itself.dtype == torch.bool else itself > torch.finfo(itself.dtype).min / 2


def leading_padding(
    mask: torch.Tensor, first_new: int, known: torch.Tensor | None, batch_size: int, first_column: int = 0
) -> torch.Tensor | None:
    """
    Learn the left padding of every sequence, `[batch_size]`, from the mask of an update of several tokens, which has
    one row per new token; `None` if there is none.

    A token that may not attend to itself is padding; that holds for left padding and not for sliding windows or custom
    patterns.

    Args:
        first_new (`int`): position of the first new token.
        known (`torch.Tensor` of shape `[batch_size]`, *optional*): padding known from earlier updates.
        first_column (`int`, *optional*, defaults to 0): position that the mask's first column is of.
    """
    if first_new > 0 and known is None:
        return None
    real = _sees_itself(mask, first_new, first_column)
    run = (real.cumsum(dim=1) == 0).sum(dim=1).expand(batch_size)
    if known is not None:
        run = torch.where(known.to(run.device) == first_new, first_new + run, known.to(run.device))
    return run.clone() if bool((run > 0).any()) else None
