"""A store whose pool holds keys and values as they are, beside a copy of the keys that is small enough to stay.

Legend: B batch, H key/value heads, D head dim.
"""

from collections.abc import Iterator

import torch

from kvcache_plugins.layers.left_padding import LeftPadding

from .pool import TokenPool
from .scoring import ScoringStates
from .scoring_codes import NUM_FITTED, ScoringCodes
from .scoring_columns import ScoringColumns
from .selection import Selection
from .token_store import TokenStore


class ExactStore(TokenStore):
    """Tokens in full precision, with a limit to the pool if the options have one."""

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        position: int,
        padding: LeftPadding,
        queries: torch.Tensor | None = None,
    ) -> None:
        config, pool = self.config, self.pool
        if pool is None:
            pool = TokenPool(
                keys,
                values,
                max_tokens=config.pool_tokens,
                eviction=config.eviction,
                num_protected=config.sink,
                folder=config.folder,
            )
        room = keys.shape[2]
        if config.pool_tokens is not None:
            room = min(room, config.pool_tokens - pool.num_slots)
        taken = pool.append(keys, values, position, padding.counts)
        self.pool = pool
        if self.scoring is None:
            count = room if queries is None else queries.shape[2]
            self.scoring = self._make_scoring(keys[:, :, :room], queries, position, count, padding)
        self._score(self.scoring, keys, room, taken)
        if not taken and isinstance(self.scoring, ScoringCodes):
            self._refit(self.scoring, padding)

    def _make_scoring(
        self, keys: torch.Tensor, queries: torch.Tensor | None, position: int, count: int, padding: LeftPadding
    ) -> ScoringStates:
        """What will be scored, told from the first keys; of `count` tokens it matters which are padding."""
        valid = padding.valid_tokens(position, count, self.device)
        if self.config.partial_ratio is not None:
            assert self.config.skewing is not None
            return ScoringColumns(keys, queries, valid, self.config.partial_ratio, self.config.skewing)
        assert self.config.scoring_nbits is not None
        scoring = ScoringCodes(self.config.scoring_nbits)
        scoring.fit(keys, valid)
        scoring.num_fitted = max(keys.shape[2] - padding.longest(), 0)
        return scoring

    def _score(self, scoring: ScoringStates, keys: torch.Tensor, room: int, taken: list[torch.Tensor]) -> None:
        """Notes for scoring what has gone into the pool: `room` tokens at its end, the others into slots."""
        scoring.append(keys[:, :, :room])
        start = room
        for slots in taken:
            scoring.write(slots, keys[:, :, start : start + slots.shape[2]])
            start += slots.shape[2]

    def _refit(self, scoring: ScoringCodes, padding: LeftPadding) -> None:
        """Tells channels' statistics anew as long as they are those of few tokens."""
        if scoring.num_fitted >= NUM_FITTED:
            return
        if scoring.length > scoring.num_fitted + padding.longest():
            keys = self.keys()
            scoring.fit(keys, padding.valid_tokens(0, keys.shape[2], self.device))
            scoring.rewrite(keys)
        scoring.num_fitted = max(scoring.length - padding.longest(), 0)

    def stretches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        assert self.pool is not None
        return self.pool.stretches()

    def rows_on_host(self, selection: Selection) -> tuple[list[torch.Tensor], torch.Tensor]:
        assert self.pool is not None
        if self.pool.disk is not None:
            return super().rows_on_host(selection)
        return self.pool.pages, selection.slots

    def dense_rows(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return rows
