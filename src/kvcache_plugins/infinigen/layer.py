"""One layer of an InfiniGen cache: which of the tokens in host memory a decode step attends to.

A decode step: while the layer before computes, `speculate` is given the queries that this layer is expected to ask
with, chooses tokens and starts to fetch them; `attend` waits for those and attends to them and the window. Several new
tokens at once attend to everything, page by page.

On a GPU the host asks for nothing that is computed in a step: not which tokens were chosen, nor how many. All shapes
follow from lengths that it knows; what is counted is counted there. A limited pool is the exception: whose use is kept
account of on the host, which waits for every choice.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from kvcache_plugins.ops.attention import attend
from kvcache_plugins.ops.gather import attend_rows, choose_rows_kernel

from .config import InfiniGenConfig
from .counters import DeviceCounters, TransferTimes
from .fetching import Fetch, attended_columns
from .offloaded_layer import OffloadedLayer
from .prefetch import attend_staged, start_fetch
from .selection import Selection, most_chosen, select_tokens


class InfiniGenLayer(OffloadedLayer):
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
        "fused_calls",
        "kernel_fallbacks",
        "tokens_fetched",
        "tokens_fetchable",
        "bytes_fetched",
        "tokens_evicted",
        "hits",
        "hits_possible",
        "prompts_without_mask",
    )

    def __init__(self, config: InfiniGenConfig, layer_idx: int, attention_mask: torch.Tensor | None = None):
        super().__init__(config, layer_idx, attention_mask)
        self._start_counting()

    def _clear(self) -> None:
        super()._clear()
        self._fetch: Fetch | None = None
        # Compares the prompt's queries with what speculation makes of their input; held for one forward only
        self.check_queries: Callable[[torch.Tensor], None] | None = None

    def _start_counting(self) -> None:
        self._device_counters = DeviceCounters()
        self._times = TransferTimes() if self.config.track_times else None

    def reset(self) -> None:
        super().reset()
        self._start_counting()

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        super()._store_prompt(keys, values, is_first=is_first)
        self.check_queries = None

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        if self.check_queries is not None:
            check, self.check_queries = self.check_queries, None
            check(query)
        if self.config.partial_ratio is not None:
            self._prompt_queries = query
        super().on_exact_attention(query, attn_mask, is_causal=is_causal, scale=scale)

    @property
    def wants_speculation(self) -> bool:
        """Whether there is anything to fetch for a next single token."""
        return self._pending is None and self.pool is not None

    @property
    def _max_forced(self) -> int:
        return self.config.sink + self.config.recent

    def most_fetched_bytes(self) -> int:
        """Bytes that a next step fetches at most."""
        pool = self.pool
        if pool is None:
            return 0
        most = most_chosen(self.config, self._length + 1, self._max_forced, pool.num_slots)
        return self.batch_size * pool.num_heads * most * pool.row_dim * pool.dtype.itemsize

    def _move_to_pool(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        if self.pool is None:
            # What is held does not depend on whether a token has been fetched yet
            self._device_counters.add("tokens_fetched", torch.zeros((), dtype=torch.int64, device=keys.device))
        super()._move_to_pool(keys, values, position)

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
            length,
            self._max_forced,
            config,
        )
        return Fetch(selection, length, start_fetch(pool, selection, self._times))

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
        self._fetch = None
        if fetch is None or fetch.length != self._length:
            # Nothing was speculated for this token: its own query is at hand
            fetch = self._choose(query, attn_mask, scale, self._length)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(self.batch_size, 1, attn_mask.shape[-2], self._length)[:, 0, 0]
        rows = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3])
        newest, start = (window.keys, window.values), self._pooled
        # A copy of a fetch has its choice and no rows
        staged = fetch.staged or start_fetch(pool, fetch.selection, self._times)
        positions = None if attn_mask is None else pool.positions_of(fetch.selection.slots, slice(None))
        if staged is None:
            kernel, is_fallback = choose_rows_kernel(rows, self._shapes["values"][3], newest[0].dtype)
            output = attend_rows(
                rows,
                *self._rows_on_host(fetch.selection),
                fetch.selection.count,
                *newest,
                scale,
                mask=attn_mask,
                positions=positions,
                window_start=start,
                kernel=kernel,
            )
            self._counters["fused_calls"] += kernel != "torch"
            self._counters["kernel_fallbacks"] += is_fallback
        else:
            with staged as fetched:
                dense = self._dense_rows(fetched, fetch.selection.slots)
                output = attend_staged(rows, fetch.selection, dense, newest, attn_mask, positions, start, scale)
        self._note(fetch.selection, rows, scale)
        return output.reshape(*query.shape[:3], -1)

    def _rows_on_host(self, selection: Selection) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Pages of rows as `ops.gather.attend_rows` takes them, and the slots in them of what was chosen."""
        assert self.pool is not None
        return self.pool.pages, selection.slots

    def _dense_rows(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Keys and values side by side, `[B, H, K, D + E]`, of rows of the pool and their slots `[B, H, K]`."""
        return rows

    def _note(self, selection: Selection, query: torch.Tensor, scale: float) -> None:
        """Counts what was fetched, and how much of it was right."""
        pool, on_device = self.pool, self._device_counters
        assert pool is not None
        self._counters["selected_calls"] += 1
        self._counters["tokens_fetchable"] += self._length * self.batch_size * pool.num_heads
        if self.padding is not None:
            on_device.add("tokens_fetchable", -pool.num_heads * self.padding.sum())
        on_device.add("tokens_fetched", selection.count.sum())
        if pool.usage is not None:
            pool.usage.touch(selection.slots.to("cpu"), selection.valid.to("cpu"))
        if self.config.track_hits:
            on_device.add("hits", self._count_hits(selection, query.float() * scale))
            on_device.add("hits_possible", selection.count.sum())

    def _count_hits(self, selection: Selection, query: torch.Tensor) -> torch.Tensor:
        """How many of the tokens chosen are among as many with the highest true weights."""
        assert self.pool is not None
        keys = self._pooled_keys()
        start = 0 if self.padding is None else self.padding[:, None, None]
        excluded = self.pool.positions(self.device) < start
        scores = (query @ keys.float().transpose(2, 3)).masked_fill(excluded[:, :, None], -torch.inf)
        best = scores.softmax(dim=3).mean(dim=2).topk(selection.slots.shape[2], dim=2).indices
        ranks = torch.arange(best.shape[2], device=best.device) < selection.count[..., None]
        is_best = torch.zeros(*best.shape[:2], keys.shape[2], dtype=torch.bool, device=best.device)
        is_best.scatter_(2, best, ranks)
        return (is_best.gather(2, selection.slots) & selection.valid).sum()

    def _drop_newest(self, count: int) -> None:
        self._fetch = None
        super()._drop_newest(count)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._fetch = None
        super()._map_stored(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._stored_tensors()
        for tensor in self._device_counters.tensors():
            yield "index", tensor

    def _move_to(self, device: torch.device) -> None:
        self._fetch = None
        super()._move_to(device)

    def stats(self) -> Mapping[str, float]:
        counters = dict(self._counters)
        for name, value in self._device_counters.values().items():
            counters[name] += value
        if self.pool is not None:
            counters["bytes_fetched"] = counters["tokens_fetched"] * self.pool.row_dim * self.pool.dtype.itemsize
        times: dict[str, float] = {}
        if self._times is not None:
            times = {"transfer_s": 0.0, "stalled_s": 0.0, **self._times.seconds()}
        return {
            "tokens_cached": self._length,
            "tokens_pooled": 0 if self.pool is None else self.pool.num_slots,
            **counters,
            "dense_reads": self.dense_reads,
            **times,
        }
