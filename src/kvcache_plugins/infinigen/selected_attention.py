"""Attention of one new token over the tokens that were chosen for it and the window.

On a CPU the store attends, where its rows stand; on a GPU rows are read from a staging buffer.

Legend: B batch, H key/value heads, G query heads a key/value head, K slots chosen at most (filling among them), D and
E head dimensions of keys and values, W tokens of the window.
"""

import torch

from .counters import TransferTimes
from .fetching import Fetch
from .offloaded_tokens import OffloadedTokens
from .prefetch import start_fetch
from .selection import Selection


def attend_selected(
    query: torch.Tensor,
    fetch: Fetch,
    tokens: OffloadedTokens,
    mask: torch.Tensor | None,
    scale: float,
    times: TransferTimes | None,
) -> tuple[torch.Tensor, str | None, bool]:
    """
    Attention of one new token.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
        fetch (`Fetch`): what was chosen for it.
        tokens (`OffloadedTokens`): what it was chosen of, the new token among them.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the mask's row, boolean or added to the scores.
        scale (`float`): factor of the scores.
        times (`TransferTimes`, *optional*): where a transfer that has to be made is noted.

    Returns:
        The output `[B, H, G, E]` in the query's dtype; and, for rows on the host, the kernel that made it and whether
        that is not the one that was wanted, otherwise `None` and `False`.
    """
    store, window = tokens.store, tokens.window
    assert store.pool is not None and window is not None
    newest, selection = (window.keys, window.values), fetch.selection
    # A copy of a fetch has its choice and no rows
    staged = fetch.staged or start_fetch(store.pool, selection, times)
    if staged is None:
        return store.attend(query, selection, newest, scale, mask, tokens.num_pooled)
    positions = None if mask is None else store.pool.positions_of(selection.slots, slice(None))
    with staged as rows:
        dense = store.dense_rows(rows, selection.slots)
        output = attend_staged(query, selection, dense, newest, mask, positions, tokens.num_pooled, scale)
    return output, None, False


def attend_staged(
    query: torch.Tensor,
    selection: Selection,
    rows: torch.Tensor,
    window: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    window_start: int,
    scale: float,
) -> torch.Tensor:
    """
    Attention of one new token over staged rows and the window: `tokens.attend_rows` without the host knowing how
    many rows there are. All shapes are those of the most that may be fetched, so an item's result does not depend on
    how many tokens its neighbours fetch; what is no row counts neither as key nor as value, whatever stands there.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
        selection (`Selection`): what the rows are of.
        rows (`torch.Tensor` of shape `[B, H, K, D + E]`): the rows, as many as `selection.count` says.
        window (`tuple[torch.Tensor, torch.Tensor]`): keys and values of the newest tokens, `[B, H, W, D or E]`.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the mask's row, boolean or added to the scores.
        positions (`torch.Tensor` of shape `[B, H, K]`, *optional*): positions of the rows' tokens, needed with a mask.
        window_start (`int`): position of the window's first token.
        scale (`float`): factor of the scores.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype.
    """
    num_staged, key_dim = rows.shape[2], query.shape[3]
    is_filling = ~selection.valid  # [B, H, K]
    scaled = query.float() * scale
    keys, values = rows[..., :key_dim].float(), rows[..., key_dim:].float()
    # Zero times NaN is NaN: a probability of zero alone would not do
    values = values.masked_fill(is_filling[..., None], 0.0)
    staged = (scaled @ keys.transpose(2, 3)).masked_fill(is_filling[:, :, None], -torch.inf)
    scores = torch.cat([staged, scaled @ window[0].float().transpose(2, 3)], dim=3)  # [B, H, G, K + W]
    if mask is not None:
        assert positions is not None
        columns = mask[:, None].expand(-1, query.shape[1], -1)
        seen = torch.cat([columns.gather(2, positions.clamp(min=0)), columns[..., window_start:]], dim=2)[:, :, None]
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.float()
    weights = scores.softmax(dim=3)
    output = weights[..., :num_staged] @ values + weights[..., num_staged:] @ window[1].float()
    return output.to(query.dtype)
