"""What is fetched from the pool for one step, and how much of it was right.

On a CPU nothing has to be fetched: rows are read where they stand. On a GPU the rows go into a staging buffer on a
stream of their own while the layer before computes.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N slots in use.
"""

from dataclasses import dataclass

import torch

from kvcache_plugins.layers.left_padding import LeftPadding

from .config import InfiniGenConfig
from .offloaded_tokens import OffloadedTokens
from .selection import Ends, Selection, select_tokens
from .staging import StagedRows
from .token_store import TokenStore


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


def choose_tokens(
    query: torch.Tensor, tokens: OffloadedTokens, columns: torch.Tensor | None, length: int, config: InfiniGenConfig
) -> Selection:
    """
    Chooses tokens of the store for a query.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the query, times the factor of the scores, float32.
        tokens (`OffloadedTokens`): what is held.
        columns (`torch.Tensor` of shape `[B, length]`, *optional*): which tokens may be attended to; `None` if all.
        length (`int`): tokens of the sequence, the new one included, which may not be held yet.
        config (`InfiniGenConfig`): the rule.
    """
    pool, scoring, window = tokens.store.pool, tokens.store.scoring, tokens.window
    assert pool is not None and scoring is not None and window is not None
    allowed: torch.Tensor | None = None
    forced: torch.Tensor | Ends = Ends(config.sink, length - config.recent)
    if columns is None and pool.usage is not None:
        positions = pool.positions(query.device)
        allowed = positions >= 0
        forced = (positions < config.sink) | (positions >= length - config.recent)
    elif columns is not None:
        positions = pool.positions(query.device)
        index = positions.clamp(min=0).expand(query.shape[0], -1, -1)
        allowed, forced = (
            each[:, None].expand(-1, index.shape[1], -1).gather(2, index) & (positions >= 0)
            for each in (columns, _first_and_last(columns, config))
        )
    resident = query @ window.keys.float().transpose(2, 3)
    if columns is not None:
        stop = tokens.num_pooled + window.length
        resident = resident.masked_fill(~columns[:, None, None, tokens.num_pooled : stop], -torch.inf)
    return select_tokens(
        scoring.scores(query),
        resident,
        allowed,
        forced,
        length if columns is None else columns.sum(dim=1),
        length,
        max_forced(config),
        config,
    )


def max_forced(config: InfiniGenConfig) -> int:
    """The most tokens that are chosen whatever their score."""
    return config.sink + config.recent


def _first_and_last(columns: torch.Tensor, config: InfiniGenConfig) -> torch.Tensor:
    """Of the tokens attended to, the first and the newest, which are always fetched, `[B, length]`."""
    from_start = columns.cumsum(dim=1)
    from_end = from_start[:, -1:] - from_start
    return columns & ((from_start <= config.sink) | (from_end < config.recent))


def count_hits(store: TokenStore, selection: Selection, query: torch.Tensor, padding: LeftPadding) -> torch.Tensor:
    """How many of the tokens chosen are among as many with the highest true weights; `query` as in `choose_tokens`."""
    assert store.pool is not None
    keys = store.keys()
    start = 0 if padding.counts is None else padding.counts[:, None, None]
    excluded = store.pool.positions(keys.device) < start
    scores = (query @ keys.float().transpose(2, 3)).masked_fill(excluded[:, :, None], -torch.inf)
    best = scores.softmax(dim=3).mean(dim=2).topk(selection.slots.shape[2], dim=2).indices
    ranks = torch.arange(best.shape[2], device=best.device) < selection.count[..., None]
    is_best = torch.zeros(*best.shape[:2], keys.shape[2], dtype=torch.bool, device=best.device)
    is_best.scatter_(2, best, ranks)
    return (is_best.gather(2, selection.slots) & selection.valid).sum()
