"""Where the tokens of a layer are: the newest at hand, all older ones in a pool, with what is kept to choose them by.

The life of a token: a prompt is attended to exactly and then moves into the pool, but for its newest tokens; a decoded
token waits in the window, and the window's oldest move on in runs, at the *beginning* of an update, so that a rollback
of the newest update finds its tokens there.

On a GPU the host runs ahead: it says what is to be moved, and waits neither for states nor for pages.

`OffloadedTokens` keeps keys and values as they are. Another form says how they are encoded (`_encode`), and what keys
and values rows stand for (`dense`).

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, D and E head dimensions of keys and
values, K slots chosen, W tokens of the window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.compiled_tokens import attend_rows
from kvcache_plugins.kernels.masks import mask_columns, slice_mask
from kvcache_plugins.kernels.tokens import attend_staged, choose_rows_kernel
from kvcache_plugins.layers.left_padding import LeftPadding
from kvcache_plugins.layers.residual_buffer import ResidualBuffer

from .config import InfiniGenConfig
from .pool import TokenPool
from .scoring import NUM_FITTED, ScoringCodes, ScoringColumns, ScoringStates
from .selection import Ends, Selection, always_attended, select_tokens
from .staging import StagedRows


# Decoded tokens move into the pool so many at a time
FLUSH_LENGTH = 32

Encoded = tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]]


class OffloadedTokens:
    """
    All tokens that a layer has stored.

    Args:
        config (`InfiniGenConfig`): the options.
        layer_idx (`int`): index of the layer, named in errors.

    Attributes:
        window (`ResidualBuffer`, *optional*): the newest tokens, once there are any.
        pool (`TokenPool`, *optional*): rows of all others in host memory, once there are any.
        scoring (`ScoringStates`, *optional*): what is kept of their keys where they are scored.
        num_pooled (`int`): tokens that have gone to the pool: the position of the window's first.
    """

    def __init__(self, config: InfiniGenConfig, layer_idx: int):
        self.config, self.layer_idx, self.flush_length = config, layer_idx, FLUSH_LENGTH
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.window: ResidualBuffer | None = None
        self.pool: TokenPool | None = None
        self.scoring: ScoringStates | None = None
        self.num_pooled = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes dtype, device and head dims over from a layer's first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.head_dims = key_states.shape[3], value_states.shape[3]

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self.num_pooled + (0 if self.window is None else self.window.length)

    @property
    def num_evicted(self) -> int:
        """Tokens that have given way to others, over sequences and heads."""
        return 0 if self.pool is None or self.pool.usage is None else self.pool.usage.num_evicted

    @property
    def is_window_full(self) -> bool:
        """Tells whether some of the window is to move on."""
        return self.window is not None and self.window.length >= self.config.recent + self.flush_length

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores tokens `[B, H, tokens, D or E]` that follow, in the window."""
        if self.window is None:
            self.window = ResidualBuffer(keys, values, self.config.recent + self.flush_length)
        self.window.append(keys, values)

    def add_prompt(
        self, keys: torch.Tensor, values: torch.Tensor, padding: LeftPadding, queries: torch.Tensor | None
    ) -> None:
        """
        Stores the first tokens.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, tokens, D or E]`): their states.
            padding (`LeftPadding`): what is padding of the sequences.
            queries (`torch.Tensor` of shape `[B, H * G, tokens, D]`, *optional*): of their prompt.

        Raises:
            MemoryError: if the host has no memory for them.
            ValueError: if they cannot be stored in this form.
        """
        count = max(keys.shape[2] - self.config.recent, 0)
        if count:
            self._add(keys[:, :, :count], values[:, :, :count], padding, queries)
        self.append(keys[:, :, count:], values[:, :, count:])

    def flush(self, padding: LeftPadding) -> None:
        """Moves on what has waited in the window for long enough; errors are those of `add_prompt`."""
        window = self.window
        if window is None or not self.is_window_full:
            return
        count = (window.length - self.config.recent) // self.flush_length * self.flush_length
        self._add(window.keys[:, :, :count], window.values[:, :, :count], padding)
        window.drop_first(count)

    def _add(
        self, keys: torch.Tensor, values: torch.Tensor, padding: LeftPadding, queries: torch.Tensor | None = None
    ) -> None:
        """Moves tokens into the pool that follow those held there, as a whole or not at all."""
        config, pool, position, count = self.config, self.pool, self.num_pooled, keys.shape[2]
        limit = count if config.pool_tokens is None else config.pool_tokens
        scoring = self.scoring or self._make_scoring(keys[:, :, :limit], queries, padding)
        encoded, parts = self._encode(scoring, keys, values, padding)
        if pool is None:
            pool = TokenPool(
                parts,
                max_tokens=config.pool_tokens,
                eviction=config.eviction,
                num_protected=config.sink,
                folder=config.folder,
            )
        free = pool.free_slots(count)
        taken = pool.append(parts, position, padding.counts)
        self.pool, self.scoring, self.num_pooled = pool, scoring, position + count
        scoring.append({name: rows[:, :, :free] for name, rows in encoded.items()})
        for slots in taken:
            stop = free + slots.shape[2]
            scoring.write(slots, {name: rows[:, :, free:stop] for name, rows in encoded.items()})
            free = stop
        if not taken and isinstance(scoring, ScoringCodes):
            self._refit(scoring, padding)

    def _make_scoring(self, keys: torch.Tensor, queries: torch.Tensor | None, padding: LeftPadding) -> ScoringStates:
        """Tells from the first keys that go into the pool how they will be scored."""
        config, count = self.config, keys.shape[2]
        valid = padding.valid_tokens(0, count if queries is None else queries.shape[2], self.device)
        if config.partial_ratio is not None:
            assert config.skewing is not None
            return ScoringColumns(keys, queries, valid, config.partial_ratio, config.skewing)
        assert config.scoring_nbits is not None
        scoring = ScoringCodes(config.scoring_nbits, keys, valid)
        scoring.num_fitted = max(count - padding.longest(), 0)
        return scoring

    def _encode(
        self, scoring: ScoringStates, keys: torch.Tensor, values: torch.Tensor, padding: LeftPadding
    ) -> Encoded:
        """Makes what is scored, and parts of the pool's rows, of tokens that follow those in the pool."""
        return scoring.encode(keys), (keys, values)

    def _refit(self, scoring: ScoringCodes, padding: LeftPadding) -> None:
        """Tells channels' statistics anew as long as they are those of few tokens."""
        if scoring.num_fitted >= NUM_FITTED:
            return
        if scoring.length > scoring.num_fitted + padding.longest():
            keys = self.pooled_keys()
            scoring.refit(keys, padding.valid_tokens(0, keys.shape[2], self.device))
        scoring.num_fitted = max(scoring.length - padding.longest(), 0)

    def dense(self, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values `[B, H, K, D or E]` of rows of the pool and of their slots `[B, H, K]`."""
        keys, values = rows.split(self.head_dims, dim=3)
        return keys, values

    def _dense_pages(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Lists keys and values of the pool, page by page, with the slots that they span."""
        assert self.pool is not None
        for rows, start, stop in self.pool.iter_pages():
            slots = torch.arange(start, stop, device=rows.device).expand(*rows.shape[:2], -1)
            yield *self.dense(rows, slots), start, stop

    def pooled_keys(self) -> torch.Tensor:
        """Returns the keys of all slots of the pool, `[B, H, slots, D]`, where they are attended to."""
        return torch.cat([keys for keys, *_ in self._dense_pages()], dim=2)

    def iter_dense(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Lists keys and values `[B, H, tokens, D or E]` in order, with the positions that they span."""
        if self.pool is not None:
            yield from self._dense_pages()
        if self.window is not None:
            yield self.window.keys, self.window.values, self.num_pooled, self.length

    def parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """
        Lists everything held, page by page, with its columns of a mask.

        Args:
            attn_mask (`torch.Tensor`, *optional*): mask over all tokens.
            groups (`int`): G.
        """
        if self.pool is not None:
            usage = self.pool.usage
            for keys, values, start, stop in self._dense_pages():
                mask = slice_mask(attn_mask, start, stop)
                if usage is not None:
                    positions = usage.positions[:, :, start:stop].to(keys.device).long()
                    mask = _mask_of_slots(attn_mask, positions, self.length, groups)
                yield DensePart(keys, values, stop - start, mask)
        if self.window is not None and self.window.length:
            mask = slice_mask(attn_mask, self.num_pooled, self.length)
            yield DensePart(*self.window.tensors(), self.window.length, mask)

    def choose(self, query: torch.Tensor, columns: torch.Tensor | None, length: int) -> Selection:
        """
        Chooses tokens of the pool for a query.

        Args:
            query (`torch.Tensor` of shape `[B, H, G, D]`): the query, times the factor of the scores, float32.
            columns (`torch.Tensor` of shape `[B, length]`, *optional*): which tokens may be attended to; all if not
                given.
            length (`int`): tokens of the sequence, the new one included, which may not be held yet.
        """
        pool, scoring, window, config = self.pool, self.scoring, self.window, self.config
        assert pool is not None and scoring is not None and window is not None
        allowed: torch.Tensor | None = None
        forced: torch.Tensor | Ends = Ends(config.sink, length - config.recent)
        resident = query @ window.keys.float().transpose(2, 3)
        num_tokens: torch.Tensor | int = length
        if columns is not None:
            positions = pool.positions(query.device)
            index = positions.clamp(min=0).expand(query.shape[0], -1, -1)
            allowed, forced = (
                each[:, None].expand(-1, index.shape[1], -1).gather(2, index) & (positions >= 0)
                for each in (columns, always_attended(columns, config))
            )
            stop = self.num_pooled + window.length
            resident = resident.masked_fill(~columns[:, None, None, self.num_pooled : stop], -torch.inf)
            num_tokens = columns.sum(dim=1)
        elif pool.usage is not None:
            positions = pool.positions(query.device)
            allowed = positions >= 0
            forced = (positions < config.sink) | (positions >= length - config.recent)
        return select_tokens(scoring.scores(query), resident, allowed, forced, num_tokens, length, config)

    def attend(
        self,
        query: torch.Tensor,
        selection: Selection,
        staged: StagedRows | None,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, str | None, bool]:
        """
        Attention of one new token over the tokens that were chosen for it and the window.

        Args:
            query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
            selection (`Selection`): which tokens were chosen.
            staged (`StagedRows`, *optional*): their rows, if they are brought to a GPU.
            mask (`torch.Tensor` of shape `[B, H or 1, G or 1, tokens]`, *optional*): rows of the mask, boolean or
                added to the scores.
            scale (`float`): factor of the scores.
            softcap (`float`, *optional*), sinks (`torch.Tensor` of shape `[B or 1, H, G, 1]`, *optional*): as in
                `AttentionCall`.

        Returns:
            The output `[B, H, G, E]` in the query's dtype; and, for rows on the host, the kernel that made it and
            whether that is not the one that was wanted, otherwise `None` and `False`.
        """
        pool, window = self.pool, self.window
        assert pool is not None and window is not None
        newest, slots, count = (window.keys, window.values), selection.slots, selection.count
        positions = None if mask is None else pool.positions_of(slots)
        if staged is not None:
            with staged as rows:
                output = attend_staged(
                    query,
                    *self.dense(rows, slots),
                    count,
                    *newest,
                    scale,
                    mask,
                    positions,
                    self.num_pooled,
                    softcap,
                    sinks,
                )
            return output, None, False
        kernel, is_fallback = choose_rows_kernel(query, newest[1].shape[3], newest[0].dtype)
        is_plain = softcap is None and sinks is None and (mask is None or mask.shape[1:3] == (1, 1))
        if kernel == "compiled" and is_plain:
            output = self._attend_compiled(query, selection, None if mask is None else mask[:, 0, 0], scale)
            return output, kernel, is_fallback
        dense = self.dense(pool.gather(slots), slots)
        output = attend_staged(query, *dense, count, *newest, scale, mask, positions, self.num_pooled, softcap, sinks)
        return output, "torch", is_fallback

    def _attend_compiled(
        self, query: torch.Tensor, selection: Selection, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Attends as `attend`, by the kernel that reads rows where they stand, under a mask `[B, tokens]`."""
        pool, window, slots, count = self.pool, self.window, selection.slots, selection.count
        assert pool is not None and window is not None
        pages, positions = pool.pages, None if mask is None else pool.positions_of(slots)
        if pool.disk is not None:
            slots = slots[:, :, : max(int(count.max()), 1)]
            pages, slots = [pool.gather(slots)], torch.arange(slots.shape[2]).expand_as(slots)
        newest = window.keys, window.values
        return attend_rows(query, pages, slots, count, *newest, scale, mask, positions, self.num_pooled)

    def drop_newest(self, count: int) -> None:
        """Forgets the newest `count` tokens."""
        left = self.length - count
        if self.window is not None:
            self.window.drop_last(min(count, self.window.length))
        if left < self.num_pooled:
            assert self.pool is not None and self.scoring is not None
            self.num_pooled = left
            self.pool.truncate(left)
            self.scoring.truncate(self.pool.num_slots)

    def _stored(self) -> Iterator[TokenPool | ScoringStates]:
        yield from (stored for stored in (self.pool, self.scoring) if stored is not None)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it; the pool stays in host memory."""
        for stored in self._stored():
            stored.map(function)
        if self.window is not None:
            self.window.map(function)

    def serve(self, device: torch.device) -> None:
        """Takes states from another device from now on."""
        self.device, pool, self.pool = device, self.pool, None
        self.map(lambda tensor: tensor.to(device))
        self.pool = pool
        if pool is not None:
            pool.serve(device)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Lists part and tensor of everything stored."""
        if self.window is not None:
            for tensor in self.window.tensors():
                yield "residual", tensor
        for stored in self._stored():
            yield from stored.named_tensors()


def _mask_of_slots(attn_mask: torch.Tensor | None, positions: torch.Tensor, length: int, groups: int) -> torch.Tensor:
    """Returns columns of a mask for slots whose tokens differ from head to head, `[B, H * G, Q or 1, slots]`."""
    held = (positions >= 0)[:, :, None]
    if attn_mask is not None:
        by_head = (
            mask_columns(attn_mask, head.clamp(min=0), positions.shape[0], length) for head in positions.unbind(dim=1)
        )
        mask = torch.cat([each[:, :1] for each in by_head if each is not None], dim=1)
        held = mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
    return held.repeat_interleave(groups, dim=1)
