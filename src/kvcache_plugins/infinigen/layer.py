"""One layer of an InfiniGen cache: the newest tokens at hand, all older ones in host memory, few of them fetched.

The life of a token: a prompt is attended to exactly and then moves into the pool, but for its newest tokens; a decoded
token waits in the window, and the window's oldest move into the pool in runs, at the *beginning* of an update, so that
a rollback of the newest update finds its tokens there. Beside the pool the layer keeps a copy of the keys for scoring.

A decode step: while the layer before computes, `speculate` is given the queries that this layer is expected to ask
with, chooses tokens and starts to fetch them; `attend` waits for those and attends to them and the window. Several new
tokens at once attend to everything, page by page.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim.
"""

import warnings
from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.exact_buffer import ExactBuffer
from kvcache_plugins.ops.attention import attend
from kvcache_plugins.ops.masking import mask_columns, slice_mask
from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.prompt_layer import PromptLayer

from .config import InfiniGenConfig
from .fetching import Fetch, attend_fetched, attended_columns
from .pool import TokenPool
from .scoring import NUM_FITTED, ScoringCodes, ScoringColumns, ScoringStates
from .selection import Selection, select_tokens


class InfiniGenLayer(PromptLayer):
    """
    Keys and values of one layer, offloaded as in [InfiniGen](https://huggingface.co/papers/2406.19707).

    Args:
        config (`InfiniGenConfig`):
            The options.
        layer_idx (`int`):
            Index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            The prompt's padding mask, for attention implementations that do not show it to the cache.
    """

    counter_names = (
        "attend_calls",
        "selected_calls",
        "speculated_calls",
        "exact_calls",
        "tokens_fetched",
        "tokens_fetchable",
        "bytes_fetched",
        "tokens_evicted",
        "hits",
        "hits_possible",
        "prompts_without_mask",
    )

    def __init__(self, config: InfiniGenConfig, layer_idx: int, attention_mask: torch.Tensor | None = None):
        self.config = config
        super().__init__(layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.pool: TokenPool | None = None
        self.scoring: ScoringStates | None = None
        self.window: ExactBuffer | None = None
        self._fetch: Fetch | None = None
        # Compares the prompt's queries with what speculation makes of their input; held for one forward only
        self.check_queries: Callable[[torch.Tensor], None] | None = None
        # Queries of the prompt, `[B, H * G, tokens, D]`, while columns are chosen by them
        self._prompt_queries: torch.Tensor | None = None

    @property
    def _pooled(self) -> int:
        """Position of the first token that is not in the pool."""
        return self._length - (0 if self.window is None else self.window.length)

    def _before_update(self) -> None:
        window, config = self.window, self.config
        if window is None or window.length < config.recent + config.flush_length:
            return
        count = (window.length - config.recent) // config.flush_length * config.flush_length
        self._move_to_pool(window.keys[:, :, :count], window.values[:, :, :count], self._pooled)
        window.drop_first(count)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.window is None:
            self.window = ExactBuffer(keys, values, self.config.recent + self.config.flush_length)
        self.window.append(keys, values)

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        if self.check_queries is not None:
            check, self.check_queries = self.check_queries, None
            check(query)
        if self.config.partial_ratio is not None:
            self._prompt_queries = query
        super().on_exact_attention(query, attn_mask, is_causal=is_causal, scale=scale)

    def on_dense_read(self, side: str) -> None:
        if self.pool is not None:
            warnings.warn(
                "the whole cache is fetched for every token, as attention is not by `sdpa`: exact, and slow. "
                "`model.set_attn_implementation('sdpa')` fetches what matters",
                stacklevel=2,
            )
        super().on_dense_read(side)

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        count = max(keys.shape[2] - self.config.recent, 0)
        if count:
            self._move_to_pool(keys[:, :, :count], values[:, :, :count], 0)
        self._append(keys[:, :, count:], values[:, :, count:])
        self._prompt_queries = self.check_queries = None

    def _move_to_pool(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        """Tokens from `position` on, the first behind those in the pool."""
        config, pool = self.config, self.pool
        if pool is None:
            pool = TokenPool(
                keys,
                values,
                max_tokens=config.pool_tokens,
                eviction=config.eviction,
                num_protected=config.sink,
            )
        room = keys.shape[2]
        if config.pool_tokens is not None:
            room = min(room, config.pool_tokens - pool.num_slots)
        taken = pool.append(keys, values, position, self.padding)
        self.pool = pool
        if pool.usage is not None:
            self._counters["tokens_evicted"] = pool.usage.num_evicted
        self._score_later(keys, position, room, taken)

    def _score_later(self, keys: torch.Tensor, position: int, room: int, taken: list[torch.Tensor]) -> None:
        """Notes in the scoring copy what has gone into the pool: `room` tokens at its end, the others into slots."""
        if self.scoring is None:
            self.scoring = self._make_scoring(keys[:, :, :room], position)
        self.scoring.append(keys[:, :, :room])
        start = room
        for slots in taken:
            self.scoring.write(slots, keys[:, :, start : start + slots.shape[2]])
            start += slots.shape[2]
        if not taken and isinstance(self.scoring, ScoringCodes):
            self._refit()

    def _make_scoring(self, keys: torch.Tensor, position: int) -> ScoringStates:
        queries = self._prompt_queries
        valid = self._valid_tokens(position, keys.shape[2] if queries is None else queries.shape[2])
        if self.config.partial_ratio is not None:
            assert self.config.skewing is not None
            return ScoringColumns(keys, queries, valid, self.config.partial_ratio, self.config.skewing)
        assert self.config.scoring_nbits is not None
        scoring = ScoringCodes(self.config.scoring_nbits)
        scoring.fit(keys, valid)
        return scoring

    def _refit(self) -> None:
        """Tells channels' statistics anew as long as they are those of few tokens."""
        scoring, pool = self.scoring, self.pool
        assert isinstance(scoring, ScoringCodes) and pool is not None
        if scoring.num_fitted >= NUM_FITTED:
            return
        longest = 0 if self.padding is None else int(self.padding.max())
        if scoring.length > scoring.num_fitted + longest:
            keys = torch.cat([keys for keys, *_ in pool.stretches()], dim=2).to(self.device)
            scoring.fit(keys, self._valid_tokens(0, keys.shape[2]))
            scoring.rewrite(keys)
        scoring.num_fitted = max(scoring.length - longest, 0)

    @property
    def wants_speculation(self) -> bool:
        """Whether there is anything to fetch for a next single token."""
        return self._pending is None and self.pool is not None

    def speculate(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float) -> None:
        """
        Starts to fetch for the next token.

        Args:
            query (`torch.Tensor` of shape `[B, H * G, 1, D]`): what it is expected to ask with.
            attn_mask (`torch.Tensor`, *optional*): mask over all tokens with the next one, as attention will get it.
            scale (`float`): factor of the scores.
        """
        # So that what moves into the pool before this step is a candidate already
        self._before_update()
        self._fetch = self._choose(query, attn_mask, scale, self._length + 1)
        self._counters["speculated_calls"] += 1

    def _choose(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float, length: int) -> Fetch:
        """Chooses tokens of the pool for a query when the sequence has `length` tokens, and starts to fetch them."""
        pool, scoring, config = self.pool, self.scoring, self.config
        assert pool is not None and scoring is not None and self.window is not None
        query = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3]).float() * scale
        positions, columns = pool.positions(self.device), self._attended(attn_mask, length)
        if columns is None:
            allowed = None if pool.usage is None else positions >= 0
            forced = (positions < config.sink) | (positions >= length - config.recent)
        else:
            index = positions.clamp(min=0).expand(self.batch_size, -1, -1)
            allowed, forced = (
                each[:, None].expand(-1, index.shape[1], -1).gather(2, index) & (positions >= 0)
                for each in (columns, self._first_and_last(columns))
            )
        resident = query @ self.window.keys.float().transpose(2, 3)
        if columns is not None:
            stop = self._pooled + self.window.length
            resident = resident.masked_fill(~columns[:, None, None, self._pooled : stop], -torch.inf)
        selection = select_tokens(
            scoring.scores(query),
            resident,
            allowed,
            forced,
            length if columns is None else columns.sum(dim=1),
            config.sink + config.recent,
            config,
        )
        return Fetch(selection, length)

    def _attended(self, attn_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """Which of `length` tokens the newest may attend to, `[B, length]`; `None` if all."""
        if attn_mask is not None:
            return attended_columns(attn_mask, length, self.batch_size)
        return self._valid_tokens(0, length)

    def _first_and_last(self, columns: torch.Tensor) -> torch.Tensor:
        """Of the tokens attended to, the first and the newest, which are always fetched, `[B, length]`."""
        from_start = columns.cumsum(dim=1)
        from_end = from_start[:, -1:] - from_start
        return columns & ((from_start <= self.config.sink) | (from_end < self.config.recent))

    def _num_real(self, length: int) -> torch.Tensor | int:
        """Tokens of each item that are not padding, when there are `length` in all."""
        return length if self.padding is None else length - self.padding

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        scale = query.shape[3] ** -0.5 if scale is None else scale
        self._counters["attend_calls"] += 1
        if self._num_new == 1 and self.wants_speculation and (attn_mask is None or attn_mask.shape[-3] == 1):
            return self._attend_selected(query, attn_mask, scale)
        if is_causal:
            shape = (query.shape[2], self._length)
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
        num_heads = self._shapes["keys"][1]
        output = attend(query, self._parts(attn_mask, query.shape[1] // num_heads), num_heads, scale)
        self._counters["exact_calls"] += 1
        self._learn_padding(attn_mask)
        self.settle_prompt()
        return output

    def _attend_selected(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Attention of one new token over what was fetched for it and the window."""
        pool, window, fetch = self.pool, self.window, self._fetch
        assert pool is not None and window is not None
        if fetch is None or fetch.length != self._length:
            # Nothing was speculated for this token: its own query is at hand
            fetch = self._choose(query, attn_mask, scale, self._length)
        self._fetch = None
        if attn_mask is not None:
            attn_mask = attn_mask.expand(self.batch_size, 1, attn_mask.shape[-2], self._length)[:, 0, 0]
        rows = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3])
        output = attend_fetched(rows, fetch, pool, (window.keys, window.values), attn_mask, self._pooled, scale)
        self._note(fetch, rows, scale)
        return output.reshape(*query.shape[:3], -1)

    def _note(self, fetch: Fetch, query: torch.Tensor, scale: float) -> None:
        """Counts what was fetched, and how much of it was right."""
        pool, counters = self.pool, self._counters
        assert pool is not None
        selection = fetch.selection
        num_fetched = int(selection.count.sum())
        num_real = self._num_real(self._length)
        total = num_real * self.batch_size if isinstance(num_real, int) else int(num_real.sum())
        counters["selected_calls"] += 1
        counters["tokens_fetched"] += num_fetched
        counters["tokens_fetchable"] += total * pool.num_heads
        counters["bytes_fetched"] += num_fetched * pool.row_dim * pool.dtype.itemsize
        if pool.usage is not None:
            pool.usage.touch(selection.slots.to("cpu"), selection.valid.to("cpu"))
        if self.config.track_hits:
            hits, possible = self._count_hits(selection, query.float() * scale)
            counters["hits"] += hits
            counters["hits_possible"] += possible

    def _count_hits(self, selection: Selection, query: torch.Tensor) -> tuple[int, int]:
        """How many of the tokens chosen are among as many with the highest true weights, and how many were chosen."""
        assert self.pool is not None
        keys = torch.cat([keys for keys, *_ in self.pool.stretches()], dim=2).to(self.device)
        start = 0 if self.padding is None else self.padding[:, None, None]
        excluded = self.pool.positions(self.device) < start
        scores = (query @ keys.float().transpose(2, 3)).masked_fill(excluded[:, :, None], -torch.inf)
        best = scores.softmax(dim=3).mean(dim=2).topk(selection.slots.shape[2], dim=2).indices
        ranks = torch.arange(best.shape[2], device=best.device) < selection.count[..., None]
        is_best = torch.zeros(*best.shape[:2], keys.shape[2], dtype=torch.bool, device=best.device)
        is_best.scatter_(2, best, ranks)
        return int((is_best.gather(2, selection.slots) & selection.valid).sum()), int(selection.count.sum())

    def _parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """Everything held, page by page, with its columns of the mask."""
        if self.pool is not None:
            for keys, values, start, stop in self.pool.stretches():
                mask = slice_mask(attn_mask, start, stop)
                if self.pool.usage is not None:
                    mask = self._mask_of_slots(attn_mask, self.pool.usage.positions[:, :, start:stop], groups)
                yield DensePart(keys.to(self.device), values.to(self.device), stop - start, mask)
        position = self._pooled
        if self.window is not None and self.window.length:
            tail = self.window.length
            yield DensePart(*self.window.tensors(), tail, slice_mask(attn_mask, position, position + tail))
        if self._pending is not None:
            keys, values = self._pending
            yield DensePart(keys, values, keys.shape[2], attn_mask)

    def _mask_of_slots(self, attn_mask: torch.Tensor | None, positions: torch.Tensor, groups: int) -> torch.Tensor:
        """The columns of the mask for slots whose tokens differ from head to head, `[B, H * G, Q or 1, slots]`."""
        positions = positions.to(self.device).long()
        held = (positions >= 0)[:, :, None]
        if attn_mask is not None:
            by_head = (
                mask_columns(attn_mask, head.clamp(min=0), self.batch_size, self._length)
                for head in positions.unbind(dim=1)
            )
            mask = torch.cat([each[:, :1] for each in by_head if each is not None], dim=1)
            held = mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
        return held.repeat_interleave(groups, dim=1)

    def materialize(self, side: str) -> torch.Tensor:
        if self._counters["tokens_evicted"]:
            raise ValueError(
                "a cache that has evicted tokens cannot be made dense: use `sdpa` attention, or no `pool_tokens`"
            )
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        for part, start, stop in self._stored(side):
            dense[:, :, start:stop] = part
        return dense

    def _stored(self, side: str) -> Iterator[tuple[torch.Tensor, int, int]]:
        """States of one side in order, with the positions that they span."""
        number = 0 if side == "keys" else 1
        if self.pool is not None:
            for *states, start, stop in self.pool.stretches():
                yield states[number], start, stop
        if self.window is not None:
            yield (self.window.keys, self.window.values)[number], self._pooled, self._length
        if self._pending is not None:
            yield self._pending[number], 0, self._length

    def _drop_newest(self, count: int) -> None:
        self._fetch = None
        left = self._length - count
        if self.window is not None:
            self.window.drop_last(min(count, self.window.length))
        if self.pool is None or left >= self._pooled:
            return
        self.pool.truncate(left)
        if self.scoring is not None:
            self.scoring.truncate(self.pool.num_slots)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._fetch = None
        for stored in (self.pool, self.scoring, self.window):
            if stored is not None:
                stored.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.window is not None:
            for tensor in self.window.tensors():
                yield "residual", tensor
        if self.pool is not None:
            yield from self.pool.named_tensors()
        if self.scoring is not None:
            yield from self.scoring.named_tensors()

    def offload(self) -> None:
        """Nothing: what can stand in host memory does so already."""

    def prefetch(self) -> None:
        """Nothing: tokens are fetched when they have been chosen."""

    def _move_to(self, device: torch.device) -> None:
        self.device, self._fetch = device, None
        for stored in (self.scoring, self.window):
            if stored is not None:
                stored.map(lambda tensor: tensor.to(device))
        if self.padding is not None:
            self.padding = self.padding.to(device)

    def stats(self) -> dict[str, int]:
        pooled = 0 if self.pool is None else self.pool.num_slots
        return {
            "tokens_cached": self._length,
            "tokens_pooled": pooled,
            **self._counters,
            "dense_reads": self.dense_reads,
        }
