"""One layer of an InfiniGen cache: its newest tokens at hand, all older ones in a pool, and what a step attends to.

A prompt is attended to exactly and then moves into the pool, but for its newest tokens. Decoded tokens wait in the
window, whose oldest move on in runs at the *beginning* of an update: a rollback of the newest finds its tokens there.

On a GPU the host runs ahead: it asks for nothing that is computed in a step, not which tokens were chosen, nor how
many, and waits neither for states nor for pages. A limited pool, whose use is noted on the host, is the exception.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dimensions of keys and values, K slots
chosen.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from kvcache_plugins.formats.parts import DensePart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import slice_mask
from kvcache_plugins.kernels.ops import Tile
from kvcache_plugins.kernels.tokens import ChoosingCall, attend_staged, choose_rows_kernel
from kvcache_plugins.layers.exact_tokens import ExactTail
from kvcache_plugins.layers.lazy_layer import LazyLayer, MaskedTiles, kind_of
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.torch_contexts import in_caller_context, without_caller_contexts
from kvcache_plugins.user_warnings import warn_user

from .coded_rows import CodedRows
from .config import InfiniGenConfig
from .pool import TokenPool
from .scoring import NUM_FITTED, ScoringCodes, ScoringColumns, ScoringStates
from .selection import Selection, always_attended, attended_columns, bounds_of, most_chosen, select_tokens
from .staging import StagedRows, start_fetch


# Decoded tokens move into the pool so many at a time
FLUSH_LENGTH = 32
# Newest queries of a prompt that a codec is fitted to
_NUM_QUERIES = 256
# Tokens chosen for one step, rows of them on the way to a GPU, and tokens of the sequence with the step's
_Fetch = tuple[Selection, StagedRows | None, int]


class InfiniGenLayer(LazyLayer):
    """
    Keys and values of one layer, offloaded as in [InfiniGen](https://huggingface.co/papers/2406.19707).

    See `LazyLayer` for `layer_idx` and `attention_mask`; by default, without a `packing`, tokens are in the pool as
    they are. `window` has the newest tokens, `pool` rows of the `num_pooled` others, and `scoring` what is kept of
    their keys where they are scored. `check_queries`, held for one forward, compares the prompt's queries with what
    speculation makes of their input.
    """

    counter_names = (
        *("attend_calls", "selected_calls", "speculated_calls", "exact_calls", "fused_calls", "kernel_fallbacks"),
        *("tokens_fetched", "tokens_fetchable", "bytes_fetched", "tokens_evicted"),
        "prompts_without_mask",
    )

    def __init__(
        self,
        config: InfiniGenConfig,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        packing: RowPolicy | None = None,
    ):
        self.config, self.packing = config, packing
        super().__init__(layer_idx, attention_mask)
        self._start_counting()

    def _clear(self) -> None:
        super()._clear()
        self.window: ExactTail | None = None
        self.pool: TokenPool | None = None
        self.scoring: ScoringStates | None = None
        self.num_pooled = 0
        self._fetch: _Fetch | None = None
        self._forget_call()
        # Queries of the prompt, `[B, H * G, tokens, D]`, while its tokens' form is told by them
        self._prompt_queries: torch.Tensor | None = None
        self.check_queries: Callable[[torch.Tensor], None] | None = None

    def _forget_call(self) -> None:
        # A step over the pool as it is now, chosen by the layer's own query; and whether one like it was the last
        self._call: ChoosingCall | None = None
        self._was_alike = False

    def reset(self) -> None:
        super().reset()
        self._start_counting()

    def _start_counting(self) -> None:
        # Sums of integers that only the device knows
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def needs_prompt_attention(self) -> bool:  # type: ignore[override]
        """Columns of the scoring copy are chosen by the prompt's queries."""
        return self.config.partial_ratio is not None

    @property
    def wants_speculation(self) -> bool:
        """Tells whether there is anything to fetch for a next single token."""
        return self._pending is None and self.pool is not None

    def most_fetched_bytes(self) -> int:
        """Bytes that a next step fetches to a GPU at most; states without data are taken for a GPU's."""
        pool = self.pool
        if pool is None or not (pool.pin_memory or pool.device.type == "meta"):
            return 0
        most = most_chosen(self.config, self._length + 1, pool.num_slots)
        return self.batch_size * pool.num_heads * most * pool.row_dim * pool.dtype.itemsize

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        count = max(keys.shape[2] - self.config.recent, 0) if keys.shape[2] >= self._least_tokens else 0
        if count:
            self._move(keys, values, count, self._prompt_queries)
        self._append(keys[:, :, count:], values[:, :, count:])
        self._prompt_queries = self.check_queries = None

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.window is None:
            self.window = ExactTail(keys, values, self._window_limit)
        else:
            self.window.append(keys, values)

    @property
    def _least_tokens(self) -> int:
        """Tokens with which the first move into the pool: those that a codec is fitted to, padding aside."""
        if not isinstance(self.scoring, CodedRows) or self.pool is not None:
            return 0
        return self.scoring.packing.least_tokens + self._left_padding.ends()[0]

    @property
    def _window_limit(self) -> int:
        """Tokens in the window with which its oldest move into the pool."""
        return max(self.config.recent + FLUSH_LENGTH, self._least_tokens)

    @property
    def _is_window_full(self) -> bool:
        return self.window is not None and self.window.length >= self._window_limit

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        window = self.window
        return None if self.pool is not None or window is None else (window.keys, window.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LazyLayer.update`: a token like the last one is stored here, or left for the kernel that attends."""
        call, window, is_lazy = self._call, self.window, True
        exact: tuple[torch.Tensor, torch.Tensor] | None = None
        if window is None or self._num_new != 1 or torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled():
            return super().update(key_states, value_states)
        has_room = window.unwritten is None and window.length < min(window.capacity, window.limit)
        if call is not None and has_room and call.accept(key_states, value_states) is not None:
            window.unwritten, window.length = (key_states, value_states), window.length + 1
        elif self._is_window_full or in_caller_context() or self._token_kind != kind_of(key_states, value_states):
            return super().update(key_states, value_states)
        elif self.pool is not None:
            window.append(key_states, value_states)
        else:
            exact, is_lazy = window.append_exactly(key_states, value_states), self._records_queries
        self._length += 1
        return self._lazy(exact) if exact is None or is_lazy else exact

    def _before_update(self) -> None:
        """Moves on what has waited in the window for long enough."""
        window = self.window
        if self.scoring is None and self.packing is not None:
            head_dims = self._shapes["keys"][3], self._shapes["values"][3]
            self.scoring = CodedRows(self.packing, head_dims, self.layer_idx, self._left_padding)
        if window is None or not self._is_window_full:
            return
        count = window.length - self.config.recent
        self._move(window.keys, window.values, count)
        window.drop_first(count)

    def _move(self, keys: torch.Tensor, values: torch.Tensor, count: int, queries: torch.Tensor | None = None) -> None:
        """
        Moves the first `count` of the tokens `[B, H, tokens, D or E]` that are not in the pool there, or none
        (`MemoryError`, `ValueError`); `queries` `[B, H * G, tokens, D]` are their prompt's.
        """
        self._forget_call()
        config, pool, position = self.config, self.pool, self.num_pooled
        scoring = self.scoring or self._make_scoring(keys[:, :, : min(count, config.pool_tokens or count)], queries)
        encoded, parts = scoring.encode(keys, values, count, position)
        if pool is None:
            pool = TokenPool(parts, config.pool_tokens, config.eviction, config.sink)
        free, taken = pool.append(parts, position, self.padding)
        self.pool, self.scoring, self.num_pooled = pool, scoring, position + count
        scoring.append({name: rows[:, :, :free] for name, rows in encoded.items()})
        for slots in taken:
            stop = free + slots.shape[2]
            scoring.write(slots, {name: rows[:, :, free:stop] for name, rows in encoded.items()})
            free = stop
        if not taken and isinstance(scoring, ScoringCodes) and scoring.num_fitted < NUM_FITTED:
            # Channels' statistics are told anew as long as they are those of few tokens
            num_real = max(scoring.length - self._left_padding.ends()[1], 0)
            if num_real > scoring.num_fitted:
                keys = self.pooled_keys()
                scoring.refit(keys, self._valid_tokens(0, keys.shape[2]), num_real)
        self._counters["tokens_evicted"] = 0 if pool.usage is None else pool.usage.num_evicted
        # What is held does not depend on whether a token has been fetched yet
        self._sums.setdefault("tokens_fetched", torch.zeros((), dtype=torch.int64, device=self.device))

    def _make_scoring(self, keys: torch.Tensor, queries: torch.Tensor | None) -> ScoringStates:
        """Tells from the first keys that go into the pool how they will be scored."""
        config, count = self.config, keys.shape[2]
        valid = self._valid_tokens(0, count if queries is None else queries.shape[2])
        if config.partial_ratio is not None:
            assert config.skewing is not None
            return ScoringColumns(keys, queries, valid, config.partial_ratio, config.skewing)
        assert config.scoring_nbits is not None
        return ScoringCodes(config.scoring_nbits, keys, valid, max(count - self._left_padding.ends()[1], 0))

    @property
    def _records_queries(self) -> bool:
        """Tells whether the codec that is to come is fitted to the newest queries."""
        scoring = self.scoring
        return isinstance(scoring, CodedRows) and scoring.needs_queries(self._length + (self._pending is None))

    def on_exact_attention(self, call: AttentionCall) -> None:
        self._forget_call()
        self._learn_padding(call.mask)
        # Queries of what is projected are of other heads
        if call.project is None:
            if self.check_queries is not None:
                check, self.check_queries = self.check_queries, None
                check(call.query)
            if self.needs_prompt_attention and self._pending is not None:
                self._prompt_queries = call.query
            if isinstance(self.scoring, CodedRows) and self._records_queries:
                query = call.query[:, :, -_NUM_QUERIES:]
                valid = self._valid_tokens(self._length - query.shape[2], query.shape[2])
                self.scoring.hear(query, self._shapes["keys"][1], valid)
        self.settle_prompt()

    def dense_tiles(self, mask: torch.Tensor | None) -> MaskedTiles:
        self._refuse_evicted()
        if self.pool is not None and self._num_new == 1:
            _warn_of_all()
        self._counters["exact_calls"] += 1
        for keys, values, start, stop in self._iter_dense():
            yield keys, values, slice_mask(mask, start, stop)

    def _iter_dense(self) -> Iterator[Tile]:
        """Lists keys and values `[B, H, tokens, D or E]` in order, with the positions or slots that they span."""
        if self._pending is not None:
            yield *self._pending, 0, self._length
        yield from self._dense_pages()
        if self.window is not None and self.window.length:
            yield self.window.keys, self.window.values, self.num_pooled, self.num_pooled + self.window.length

    def _dense_pages(self) -> Iterator[Tile]:
        if (pool := self.pool) is not None and (scoring := self.scoring) is not None:
            for rows, start, stop in pool.iter_pages():
                slots = torch.arange(start, stop, dtype=torch.int64, device=rows.device).expand(*rows.shape[:2], -1)
                yield *scoring.dense(rows, slots, pool), start, stop

    def pooled_keys(self) -> torch.Tensor:
        """Returns the keys of all slots of the pool, `[B, H, slots, D]`, where they are attended to."""
        return torch.cat([keys for keys, *_ in self._dense_pages()], dim=2)

    def on_dense_read(self, side: str) -> None:
        if self.pool is not None:
            _warn_of_all()
        super().on_dense_read(side)

    @without_caller_contexts
    def speculate(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float) -> None:
        """Starts to fetch for a next token that is expected to ask with `query` `[B, H * G, 1, D]` under a mask."""
        # So that what moves into the pool before this step is a candidate already
        self._before_update()
        length = self._length + 1
        # Without a mask it is not known yet, and will hide padding
        columns = self._valid_tokens(0, length) if attn_mask is None else self._attended(attn_mask, length)
        self._fetch = self._choose(query, columns, scale, length)
        self._counters["speculated_calls"] += 1

    def _attended(self, attn_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """Marks what a step may choose under a mask `[B or 1, heads or 1, tokens, length]`: `[B, length]`, or all."""
        if attn_mask is None:
            return None
        if attn_mask.shape[1] > 1:
            # Each head has a mask of its own, such as a bias of positions, which takes no part in the choice
            return self._valid_tokens(0, length)
        return attended_columns(attn_mask, length, self.batch_size)

    def _choose(self, query: torch.Tensor, columns: torch.Tensor | None, scale: float, length: int) -> _Fetch:
        """
        Chooses tokens for a query when the sequence has `length` tokens, and starts to fetch them: of those that it
        may attend to, `columns` `[B, length]` (bool), or of all. The newest of them may not be held yet.
        """
        pool, scoring, window, config = self.pool, self.scoring, self.window, self.config
        assert pool is not None and scoring is not None and window is not None
        query = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3]).float() * scale
        if columns is None and pool.usage is not None:
            # Slots that are not in the order of tokens are told apart by positions, all of which may be attended to
            columns = torch.ones(self.batch_size, length, dtype=torch.bool, device=query.device)
        allowed: torch.Tensor | None = None
        forced: torch.Tensor | None = None
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
        selection = select_tokens(scoring.scores(query, pool), resident, allowed, forced, num_tokens, length, config)
        return selection, start_fetch(pool, selection), length

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query, attn_mask = call.query, call.mask
        scale = query.shape[3] ** -0.5 if call.scale is None else call.scale
        self._counters["attend_calls"] += 1
        # Queries of a group may come as tokens, under a mask that all heads share
        is_shared = attn_mask is None or attn_mask.shape[:-2][-1:] in ((), (1,))
        if self._num_new == 1 and self.wants_speculation and (is_shared or query.shape[2] == 1):
            return self._attend_selected(call, scale)
        num_heads = self._shapes["keys"][1]
        parts = self._parts(call.full_mask(self._length), query.shape[1] // num_heads)
        output = attend(query, parts, num_heads, scale, softcap=call.softcap, sinks=call.sinks)
        self._counters["exact_calls"] += 1
        self.on_exact_attention(call)
        return output

    def _parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """Lists everything held, with its columns of the mask."""
        pool = self.pool
        for keys, values, start, stop in self._iter_dense():
            mask = slice_mask(attn_mask, start, stop)
            if pool is not None and pool.usage is not None and start < self.num_pooled:
                positions = pool.positions(keys.device)[:, :, start:stop]
                mask = _mask_of_slots(attn_mask, positions, self._length, groups)
            yield DensePart(keys, values, stop - start, mask)

    def _attend_selected(self, call: AttentionCall, scale: float) -> torch.Tensor:
        """Attends with one new token to what was fetched for it and the window."""
        query, mask, pool = call.query, call.mask, self.pool
        assert pool is not None
        by_heads = self.batch_size, pool.num_heads, -1
        if mask is not None:
            mask = mask.expand(self.batch_size, *mask.shape[-3:-2] or (1,), mask.shape[-2], self._length)[:, :, :1]
        # What was speculated for this token; if nothing was, what its own query chooses
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch[2] != self._length:
            fetch = self._choose(query, self._attended(mask, self._length), scale, self._length)
        selection, staged, _ = fetch
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(*by_heads, self._length)
        rows = query.reshape(*by_heads, query.shape[3])
        # A copy of a fetch has its choice and no rows
        staged = staged or start_fetch(pool, selection)
        sinks = None if call.sinks is None else call.sinks.reshape(-1, *rows.shape[1:3], 1)
        own = AttentionCall(rows, mask, scale=scale, softcap=call.softcap, sinks=sinks)
        output = self.attend_selection(own, selection, staged)
        self._note(selection)
        return output.reshape(*query.shape[:3], -1)

    def _prepare_call(self, query: torch.Tensor, scale: float) -> None:
        """Describes the next steps at once if two in a row were alike, as they are not of beams that are reordered."""
        pool, window, scoring, config = self.pool, self.window, self.scoring, self.config
        is_alike = config.min_weight is not None and self.padding is None
        if is_alike and not config.speculates_on(query.device):
            assert pool is not None and window is not None and scoring is not None
            if pool.usage is None and self._was_alike:
                self._call = scoring.prepare(query, scale, pool, window.tensors())
            self._was_alike = True

    def attend_again(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        call, window = self._call, self.window
        if call is None or window is None or self._num_new != 1 or num_tokens != self._length or query.requires_grad:
            return None
        bounds = bounds_of(self.config, num_tokens, self.num_pooled)
        output = call.attend(query, scale, window.storage, window.length, window.unwritten, bounds)
        if output is not None:
            # It has been written
            window.unwritten = None
            counters, num_rows = self._counters, self.batch_size * self._shapes["keys"][1]
            counters["attend_calls"] += 1
            counters["selected_calls"] += 1
            counters["fused_calls"] += 1
            counters["tokens_fetchable"] += num_tokens * num_rows
            counters["tokens_fetched"] += call.num_chosen
        return output

    def attend_selection(self, call: AttentionCall, selection: Selection, staged: StagedRows | None) -> torch.Tensor:
        """
        Attends with one new token to the tokens that were chosen for it and the window, `[B, H, G, E]`; a call's
        queries are `[B, H, G, D]`, its mask `[B, H or 1, G or 1, tokens]`, its sinks `[B or 1, H, G, 1]`, and it has a
        scale.
        """
        pool, window, scoring, start = self.pool, self.window, self.scoring, self.num_pooled
        assert pool is not None and window is not None and scoring is not None and call.scale is not None
        query, mask, newest, slots = call.query, call.mask, (window.keys, window.values), selection.slots
        kernel, is_fallback = choose_rows_kernel(query, newest[1].shape[3], newest[0].dtype)
        self._counters["kernel_fallbacks"] += is_fallback and not pool.pin_memory
        if staged is None and kernel == "compiled" and call.is_plain and (mask is None or mask.shape[1:3] == (1, 1)):
            output = scoring.attend(call, selection, pool, newest, start)
            if output is not None:
                self._counters["fused_calls"] += not pool.pin_memory
                if mask is None:
                    self._prepare_call(query, call.scale)
                return output
        keys, values = scoring.dense(pool.gather(slots) if staged is None else staged.wait(), slots, pool)
        positions = None if mask is None else pool.positions_of(slots)
        return attend_staged(
            query, keys, values, selection.count, *newest, call.scale, mask, positions, start, call.softcap, call.sinks
        )

    def _note(self, selection: Selection) -> None:
        """Counts what was fetched."""
        pool, num_rows = self.pool, selection.count.numel()
        assert pool is not None
        self._counters["selected_calls"] += 1
        self._counters["tokens_fetchable"] += self._length * num_rows
        if self.padding is not None:
            self._add("tokens_fetchable", -pool.num_heads * self.padding.sum())
        self._add("tokens_fetched", selection.count.sum())
        if pool.usage is not None:
            pool.usage.touch(selection.slots.to("cpu"), selection.valid.to("cpu"))

    def _add(self, name: str, amount: torch.Tensor) -> None:
        """Adds an integer, a tensor without dimensions, to what the device counts."""
        before = self._sums.get(name)
        # Not in place: what was made in inference mode could not be written to outside of it
        self._sums[name] = amount if before is None else before.to(amount.device, non_blocking=True) + amount

    def _refuse_evicted(self) -> None:
        if self._counters["tokens_evicted"]:
            raise ValueError(
                "a cache that has evicted tokens cannot be made dense: use `sdpa` attention, or no `pool_tokens`"
            )

    def materialize(self, side: str) -> torch.Tensor:
        self._refuse_evicted()
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        for keys, values, start, stop in self._iter_dense():
            dense[:, :, start:stop] = keys if side == "keys" else values
        return dense

    def _drop_newest(self, count: int) -> None:
        self._forget_call()
        self._fetch, left = None, self._length - count
        if self.window is not None:
            self.window.drop_last(min(count, self.window.length))
        if left < self.num_pooled:
            assert self.pool is not None and self.scoring is not None
            self.num_pooled = left
            self.pool.truncate(left)
            self.scoring.truncate(self.pool.num_slots)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forget_call()
        self._fetch = None
        for stored in (self.pool, self.scoring, self.window):
            if stored is not None:
                stored.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.window is not None:
            for tensor in self.window.tensors():
                yield "residual", tensor
        for stored in (self.pool, self.scoring):
            if stored is not None:
                yield from stored.named_tensors()
        for tensor in self._sums.values():
            yield "index", tensor

    def host_tensors(self) -> Iterator[torch.Tensor]:
        tensors = () if self.pool is None else self.pool.named_tensors()
        return (tensor for _, tensor in tensors if not tensor.is_cuda)

    def offload(self) -> None:
        """Does nothing: what can stand in host memory does so already."""

    prefetch = offload

    def _move_to(self, device: torch.device) -> None:
        self.device, self._token_kind, pool, self.pool = device, None, self.pool, None
        self._map_stored(lambda tensor: tensor.to(device))
        self.pool = pool
        if pool is not None:
            pool.serve(device)
        if self.padding is not None:
            self.padding = self.padding.to(device)

    def stats(self) -> Mapping[str, float]:
        pool, sums = self.pool, self._sums
        counters = {name: count + int(sums.get(name, 0)) for name, count in self._counters.items()}
        if pool is not None:
            counters["bytes_fetched"] = counters["tokens_fetched"] * pool.row_dim * pool.dtype.itemsize
        held = {"tokens_cached": self._length, "tokens_pooled": 0 if pool is None else pool.num_slots}
        return {**held, **counters, "dense_reads": self.dense_reads}


def _warn_of_all() -> None:
    warn_user(
        "the whole cache is fetched for every token, as attention weights are read, or attention does not show its "
        "queries to the cache, or is over projections of what is cached: exact, and slow. Leave `output_attentions` "
        "out; `model.set_attn_implementation('sdpa')` may fetch less"
    )


def _mask_of_slots(attn_mask: torch.Tensor | None, positions: torch.Tensor, length: int, groups: int) -> torch.Tensor:
    """Returns columns of a mask for slots whose tokens differ from head to head, `[B, H * G, Q or 1, slots]`."""
    positions = positions.repeat_interleave(groups, dim=1)[:, :, None]
    held = positions >= 0
    if attn_mask is None:
        return held
    mask = attn_mask.expand(*positions.shape[:2], attn_mask.shape[-2], length)
    mask = mask.gather(3, positions.clamp(min=0).expand(-1, -1, mask.shape[2], -1))
    return mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
