"""Fetching tokens from the pool, and attention over them and the window.

On a CPU nothing has to be fetched: rows are read where they stand. On a GPU the rows go into a staging buffer on a
stream of their own while the layer before computes.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dimensions of keys and values.
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.ops.gather import attend_rows

from .pool import TokenPool
from .prefetch import StagedRows
from .selection import Selection


@dataclass(frozen=True, eq=False, slots=True)
class Fetch:
    """
    Tokens that were chosen for one step.

    Attributes:
        selection (`Selection`): which.
        length (`int`): tokens of the sequence at that step, the new one included.
        staged (`StagedRows`, *optional*): their rows on the way to a GPU.
    """

    selection: Selection
    length: int
    staged: StagedRows | None = None


def attended_columns(attn_mask: torch.Tensor, length: int, batch_size: int) -> torch.Tensor:
    """Which of `length` tokens the last query of a mask attends to, `[B, length]`, bool."""
    row = attn_mask.expand(batch_size, *attn_mask.shape[1:3], length)[:, 0, -1]
    return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2


def attend_fetched(
    query: torch.Tensor,
    fetch: Fetch,
    pool: TokenPool,
    window: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    window_start: int,
    scale: float,
    kernel: str = "torch",
) -> torch.Tensor:
    """
    Attention of one new token over what was fetched for it and the window.

    Every item is computed on its own: how many tokens its neighbours fetch must not change a bit of its result.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
        fetch (`Fetch`): the tokens of the pool.
        pool (`TokenPool`): the pool.
        window (`tuple[torch.Tensor, torch.Tensor]`): keys and values of the newest tokens, `[B, H, W, D or E]`.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the mask's row, boolean or added to the scores.
        window_start (`int`): position of the window's first token.
        scale (`float`): factor of the scores.
        kernel (`str`, *optional*, defaults to `"torch"`): what `ops.gather.choose_rows_kernel` returned.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype.
    """
    selection = fetch.selection
    return attend_rows(
        query,
        pool.pages,
        selection.slots,
        selection.count,
        *window,
        scale,
        mask=mask,
        positions=None if mask is None else pool.positions_of(selection.slots, slice(None)),
        window_start=window_start,
        kernel=kernel,
    )
