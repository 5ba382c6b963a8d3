"""One layer of an InfiniGen cache: an exact tail of the newest tokens, and all older tokens in a pool.

A prompt is committed right after its attention: all but its newest tokens move into the pool. Decoded tokens are
appended to the tail, and its oldest move into the pool at the beginning of the next update, so that a rollback finds
them exact.

On a GPU the host runs ahead: it asks for no result of a step, neither for the selected tokens nor for their number,
and waits neither for states nor for pages. A limited pool, whose use the host records, is the exception.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, K slots of a
selection.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from kvcache_plugins.formats.parts import DensePart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.kept_selection import can_select
from kvcache_plugins.kernels.masks import slice_mask
from kvcache_plugins.kernels.ops import Tile
from kvcache_plugins.kernels.selective_attention import Selection, attend_fetched, choose_rows_kernel
from kvcache_plugins.layers.exact_tokens import ExactTail, States
from kvcache_plugins.layers.lazy_layer import LazyLayer, MaskedTiles
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.torch_contexts import in_caller_context, without_caller_contexts
from kvcache_plugins.user_warnings import warn_user

from .config import InfiniGenConfig
from .pool import TokenPool
from .scoring import Scoring, ScoringCodes, ScoringColumns
from .scoring_rows import ScoringRows
from .selection import always_attended, attended_columns, max_selected, rule_of, select_tokens
from .selection_plan import DeviceSelectionPlan, SelectionPlan
from .staging import StagedRows, start_fetch


# Decoded tokens that move into the pool at once
FLUSH_LENGTH = 32


class Prefetch(NamedTuple):
    """Selection for a step, its rows if they are on their way to a GPU, and tokens of the sequence in that step."""

    selection: Selection
    rows: StagedRows | None
    length: int


class InfiniGenLayer(LazyLayer):
    """
    Keys and values of one layer, offloaded as in [InfiniGen](https://huggingface.co/papers/2406.19707).

    Args:
        config (`InfiniGenConfig`): options.
        layer_idx, attention_mask: see `LazyLayer`.
        policy (`RowPolicy`, *optional*): makes the codec of tokens in the pool; exact by default.

    Attributes:
        tail (`ExactTail`, *optional*): the newest tokens, exact.
        pool (`TokenPool`, *optional*): rows of the `num_offloaded` older tokens.
        scoring (`Scoring`, *optional*): data of the older tokens by which they are scored.
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
        policy: RowPolicy | None = None,
    ):
        self.config = config
        self.policy = policy
        super().__init__(layer_idx, attention_mask)
        # Tokens that were fetched, beside those of the counter: a number that only the device knows
        self._num_fetched: torch.Tensor | None = None

    def _clear(self) -> None:
        super()._clear()
        self.tail: ExactTail | None = None
        self.pool: TokenPool | None = None
        self.scoring: Scoring | None = None
        self._prefetch: Prefetch | None = None
        self._plan: SelectionPlan | DeviceSelectionPlan | None = None
        self._check_queries: Callable[[torch.Tensor], None] | None = None

    def invalidate_plan(self) -> None:
        """Invalidate the plan: tokens of the pool, or their padding, will change."""
        # It keeps memory of the pool as it was; plans on a GPU are for any pool
        if isinstance(self._plan, SelectionPlan):
            self._plan = None
        if self.pool is not None:
            self.pool.raise_version()
        if self.scoring is not None:
            self.scoring.drop_prepared()

    def reset(self) -> None:
        super().reset()
        self._num_fetched = None

    @property
    def num_offloaded(self) -> int:
        """Tokens that moved into the pool, evicted ones included: the position of the tail's first token."""
        return 0 if self.pool is None else self.pool.num_tokens

    @property
    def needs_prompt_attention(self) -> bool:  # type: ignore[override]
        """True if the prompt's queries are needed, which select columns of the scoring copy."""
        return self.config.partial_ratio is not None

    @property
    def wants_speculation(self) -> bool:
        """True if there is something to fetch for a next single token."""
        return self._uncommitted_prompt is None and self.pool is not None

    def most_fetched_bytes(self) -> int:
        """Return the most bytes that a next step fetches to a GPU; states on the meta device count as a GPU's."""
        pool = self.pool
        if pool is None or not (pool.pin_memory or pool.device.type == "meta"):
            return 0
        num_slots = max_selected(self.config, self._length + 1, pool.num_slots)
        return self.batch_size * pool.num_heads * num_slots * pool.row_dim * pool.dtype.itemsize

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        assert self.scoring is not None
        count = max(keys.shape[2] - self.config.recent, 0)
        if count and keys.shape[2] >= self.scoring.least_tokens:
            self._move_to_pool(keys, values, count)
        else:
            count = 0
        self._append(keys[:, :, count:], values[:, :, count:])
        self._check_queries = None

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.tail is None:
            self.tail = ExactTail(keys, values, self._tail_limit)
        else:
            self.tail.append(keys, values)

    @property
    def _tail_limit(self) -> int:
        """Tokens of a tail whose oldest move into the pool at the next update."""
        least = 0 if self.scoring is None else self.scoring.least_tokens
        return max(self.config.recent + FLUSH_LENGTH, least)

    def _exact_states(self) -> States | None:
        tail = self.tail
        return None if self.pool is not None or tail is None else (tail.keys, tail.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LazyLayer.update`. A token like the last one is stored here, or by the plan that attends."""
        tail = self.tail
        if (
            tail is None
            or self._num_new != 1
            or self.handed_out.scores
            or self.handed_out.has_gradients
            or tail.length >= tail.limit
            or torch.compiler.is_dynamo_compiling()
            or torch.is_grad_enabled()
        ):
            return super().update(key_states, value_states)
        pool = self.pool
        if not self._push(tail, key_states, value_states):
            if in_caller_context() or not tail.fits(key_states, value_states):
                return super().update(key_states, value_states)
            if pool is None:
                exact = tail.append_exactly(key_states, value_states)
                self._length += 1
                return self._lazy(exact) if self._records_queries else exact
            tail.append(key_states, value_states)
        self._length += 1
        return self._lazy()

    def _push(self, tail: ExactTail, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Store a token `[B, H, 1, D or E]` by the plan of the last step. Return False if there is none for it."""
        pool = self.pool
        plan = self._plan
        if pool is None or plan is None or isinstance(plan, SelectionPlan) and plan.version != pool.version:
            return False
        return plan.push_into(tail, keys, values)

    def _before_update(self) -> None:
        """Move the oldest tokens of a full tail into the pool."""
        if self.scoring is None:
            self.scoring = self._make_scoring()
        tail = self.tail
        if tail is None:
            return
        if tail.length >= self._tail_limit:
            count = tail.length - self.config.recent
            others = tail.copy_without(count)
            self._move_to_pool(tail.keys, tail.values, count)
            tail.drop_first(count, others)
        # The limit changes once a codec is fitted, or padding is known
        tail.limit = self._tail_limit

    def _make_scoring(self) -> Scoring:
        if self.policy is not None:
            head_dims = self._shapes["keys"][3], self._shapes["values"][3]
            return ScoringRows(self.policy, head_dims, self.layer_idx, self._left_padding)
        if self.config.partial_ratio is not None:
            return ScoringColumns(self.config, self._left_padding)
        return ScoringCodes(self.config, self._left_padding)

    def _move_to_pool(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        """
        Move the first `count` of the tokens `[B, H, tokens, D or E]` that follow those of the pool there. If anything
        is raised, none move; a layer that has evicted tokens for them by then is emptied.
        """
        self.invalidate_plan()
        config = self.config
        pool = self.pool
        # A copy takes the fitted parameters, so that an error leaves the layer as it was
        scoring = copy.copy(self.scoring)
        assert scoring is not None
        rows, parts = scoring.encode(keys, values, count, self.num_offloaded)
        if pool is None:
            assert config.eviction is not None
            pool = TokenPool(parts, config.pool_tokens, config.eviction, config.sink)
        num_tokens, num_evicted = pool.num_tokens, pool.num_evicted
        try:
            num_appended, taken = pool.append(parts, self.padding)
            scoring.store(rows, num_appended, taken, pool)
        except BaseException:
            if pool.num_evicted == num_evicted:
                pool.truncate(num_tokens)
            else:
                self._empty()
            raise
        self.pool = pool
        self.scoring = scoring
        self._counters["tokens_evicted"] = pool.num_evicted
        if self._num_fetched is None:
            # From now on, so that memory does not depend on whether a token was fetched yet
            self._num_fetched = torch.zeros((), dtype=torch.int64, device=self.device)

    @property
    def _records_queries(self) -> bool:
        """True if queries of the newest update are to be recorded."""
        scoring = self.scoring
        return scoring is not None and scoring.needs_queries(
            self._length, is_prompt=self._uncommitted_prompt is not None
        )

    def on_exact_attention(self, call: AttentionCall) -> None:
        self._learn_padding(call.mask)
        # Queries of projected states have other heads
        if call.project is None:
            check, self._check_queries = self._check_queries, None
            if check is not None:
                check(call.query)
            if self.scoring is not None and self._records_queries:
                self.scoring.record_queries(call.query, self._shapes["keys"][1], self._length)
        self.commit_prompt()

    def iter_dense(self, mask: torch.Tensor | None) -> MaskedTiles:
        self._refuse_evicted()
        if self.pool is not None and self._num_new == 1:
            _warn_of_fetching_all()
        self._counters["exact_calls"] += 1
        for keys, values, start, stop in self._iter_dense():
            yield keys, values, slice_mask(mask, start, stop)

    def _iter_dense(self) -> Iterator[Tile]:
        """Yield keys and values `[B, H, tokens, D or E]` in order, with their range of positions or slots."""
        if self._uncommitted_prompt is not None:
            keys, values, _ = self._uncommitted_prompt
            yield keys, values, 0, self._length
        yield from self._dense_pages()
        tail = self.tail
        if tail is not None and tail.length:
            start = self.num_offloaded
            yield tail.keys, tail.values, start, start + tail.length

    def _dense_pages(self) -> Iterator[Tile]:
        if (pool := self.pool) is not None and (scoring := self.scoring) is not None:
            for rows, start, stop in pool.iter_pages():
                slots = torch.arange(start, stop, dtype=torch.int64, device=rows.device).expand(*rows.shape[:2], -1)
                yield *scoring.dense(rows, slots, pool), start, stop

    def pooled_keys(self) -> torch.Tensor:
        """Return the keys of all slots of the pool, `[B, H, slots, D]`, on the layer's device."""
        return torch.cat([keys for keys, *_ in self._dense_pages()], dim=2)

    def note_dense_read(self, side: str) -> None:
        if self.pool is not None:
            _warn_of_fetching_all()
        super().note_dense_read(side)

    def check_queries(self, check: Callable[[torch.Tensor], None] | None) -> None:
        """Have `check` compare the prompt's queries, in this forward, with those that their projection makes."""
        self._check_queries = check

    @without_caller_contexts
    def speculate(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float) -> None:
        """Start to fetch for a next token, whose predicted query is `query` `[B, H * G, 1, D]`, under a mask."""
        # Tokens that move into the pool before the next step can be selected for it
        self._before_update()
        self._prefetch = self._select_tokens(query, attn_mask, scale, self._length + 1, hides_padding=True)
        self._counters["speculated_calls"] += 1

    def _attended(self, attn_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """
        Return a mask `[B, length]` of tokens that a step may select under an attention mask
        `[B or 1, heads or 1, tokens, length]`; `None` if it may select all.
        """
        if attn_mask is None:
            return None
        if attn_mask.shape[1] > 1:
            # A mask for each head, such as a bias of positions, takes no part in the selection
            return self._left_padding.valid_tokens(0, length, self.device)
        return attended_columns(attn_mask, length, self.batch_size)

    def _select_tokens(
        self,
        query: torch.Tensor,
        attn_mask: torch.Tensor | None,
        scale: float,
        length: int,
        *,
        hides_padding: bool = False,
    ) -> Prefetch:
        """
        Select tokens for a query `[B, H * G, 1, D]` when the sequence has `length` tokens, and start to fetch them;
        the newest may not be stored yet. Without a mask all tokens may be selected, or all but padding.
        """
        plan = self._plan_on_device(query, attn_mask, scale)
        if plan is not None:
            return self._select_on_device(plan, query, attn_mask, length, hides_padding=hides_padding)
        if attn_mask is None and hides_padding:
            columns = self._left_padding.valid_tokens(0, length, self.device)
        else:
            columns = self._attended(attn_mask, length)
        selection = self._select_columns(query, columns, scale, length)
        pool, _, _ = self._stored()
        return Prefetch(selection, start_fetch(pool, selection), length)

    def _plan_on_device(
        self, query: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> DeviceSelectionPlan | None:
        """
        Return the plan of a step on a GPU with queries `[B, H * G, 1, D]` under a mask `[B or 1, any, 1, tokens]`;
        `None` if its kernels are not for them.
        """
        pool, _, tail = self._stored()
        if not pool.pin_memory or pool.usage is not None or pool.device.type == "meta":
            return None
        if mask is not None and (mask.dtype != torch.bool or mask.shape[1] > 1):
            return None
        plan = self._plan
        if isinstance(plan, DeviceSelectionPlan) and plan.fits(query, scale):
            return plan
        self._plan = None
        value_dim, dtype = tail.storage[1].shape[3], tail.storage[0].dtype
        if not can_select(query, pool.num_heads, value_dim, dtype) or pool.addresses_for(query) is None:
            return None
        self._plan = plan = DeviceSelectionPlan(query, pool.num_heads, rule_of(self.config), scale)
        return plan

    def _select_on_device(
        self,
        plan: DeviceSelectionPlan,
        query: torch.Tensor,
        attn_mask: torch.Tensor | None,
        length: int,
        *,
        hides_padding: bool,
    ) -> Prefetch:
        pool, scoring, tail = self._stored()
        padding: torch.Tensor | None = None
        if attn_mask is None and hides_padding and self._left_padding.ends()[1]:
            padding = self.padding
        mask = None if attn_mask is None else attn_mask[:, 0, -1].expand(-1, length)
        limit = max_selected(self.config, length, pool.num_slots)
        with plan.on_device():
            rows = plan.aligned(query)
            scores = scoring.scores_by(plan, rows, pool)
            selection = plan.choose(scores, rows, tail, length, limit, mask, padding)
        return Prefetch(selection, start_fetch(pool, selection, plan), length)

    def _select_columns(
        self, query: torch.Tensor, columns: torch.Tensor | None, scale: float, length: int
    ) -> Selection:
        """Select among tokens by `columns` `[B, length]` (bool), by default among all, in PyTorch or C."""
        pool, scoring, tail = self._stored()
        config = self.config
        query = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3]).float() * scale
        if columns is None and pool.usage is not None:
            # Slots are not in order, so that the rule needs their positions; all tokens may be attended to
            columns = torch.ones(self.batch_size, length, dtype=torch.bool, device=query.device)
        allowed: torch.Tensor | None = None
        forced: torch.Tensor | None = None
        tail_scores = query @ tail.keys.float().transpose(2, 3)
        num_tokens: torch.Tensor | int = length
        if columns is not None:
            positions = pool.positions(query.device)
            index = positions.clamp(min=0).expand(query.shape[0], -1, -1)
            allowed, forced = (
                each[:, None].expand(-1, index.shape[1], -1).gather(2, index) & (positions >= 0)
                for each in (columns, always_attended(columns, config))
            )
            tail_columns = columns[:, None, None, pool.num_tokens : pool.num_tokens + tail.length]
            tail_scores = tail_scores.masked_fill(~tail_columns, -torch.inf)
            num_tokens = columns.sum(dim=1)
        scores = scoring.scores(query, pool)
        return select_tokens(scores, tail_scores, allowed, forced, num_tokens, length, config)

    def _stored(self) -> tuple[TokenPool, Scoring, ExactTail]:
        """Return the pool, scoring data and the tail of a layer that has a pool."""
        assert self.pool is not None and self.scoring is not None and self.tail is not None
        return self.pool, self.scoring, self.tail

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query = call.query
        scale = query.shape[3] ** -0.5 if call.scale is None else call.scale
        self._counters["attend_calls"] += 1
        # Queries of a group may come as tokens, under a mask that all heads share
        is_shared = call.mask is None or call.mask.shape[:-2][-1:] in ((), (1,))
        if self._num_new == 1 and self.wants_speculation and (is_shared or query.shape[2] == 1):
            return self._attend_selected(call, scale)
        num_heads = self._shapes["keys"][1]
        parts = self._parts(call.full_mask(self._length), query.shape[1] // num_heads)
        output = attend(query, parts, num_heads, scale, softcap=call.softcap, sinks=call.sinks)
        self._counters["exact_calls"] += 1
        self.on_exact_attention(call)
        return output

    def _parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """Yield everything stored, with its columns of the mask."""
        pool = self.pool
        for keys, values, start, stop in self._iter_dense():
            mask = slice_mask(attn_mask, start, stop)
            if pool is not None and pool.usage is not None and start < self.num_offloaded:
                positions = pool.positions(keys.device)[:, :, start:stop]
                mask = _mask_of_slots(attn_mask, positions, self._length, groups)
            yield DensePart(keys, values, stop - start, mask)

    def _attend_selected(self, call: AttentionCall, scale: float) -> torch.Tensor:
        """Attend with one new token to the tokens selected for it and the tail."""
        query = call.query
        mask = call.mask
        pool, _, _ = self._stored()
        if mask is not None:
            mask = mask.expand(self.batch_size, *mask.shape[-3:-2] or (1,), mask.shape[-2], self._length)[:, :, :1]
        own = query.reshape(self.batch_size, -1, 1, query.shape[3])
        # Without a prefetch for this token, its own query selects
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is None or prefetch.length != self._length:
            prefetch = self._select_tokens(own, mask, scale, self._length)
        selection = prefetch.selection
        plan = self._plan_on_device(own, mask, scale) if call.is_plain else None
        if plan is not None:
            return self._attend_on_device(plan, own, mask, prefetch).view(*query.shape[:3], -1)
        # The copy of a prefetch has no rows
        fetched = prefetch.rows or start_fetch(pool, selection)
        rows = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3])
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(self.batch_size, pool.num_heads, -1, self._length)
        sinks = None if call.sinks is None else call.sinks.reshape(-1, *rows.shape[1:3], 1)
        grouped = AttentionCall(rows, mask, scale=scale, softcap=call.softcap, sinks=sinks)
        output = self.attend_selection(grouped, selection, fetched)
        self._record_use(selection)
        return output.reshape(*query.shape[:3], -1)

    def _attend_on_device(
        self, plan: DeviceSelectionPlan, query: torch.Tensor, mask: torch.Tensor | None, prefetch: Prefetch
    ) -> torch.Tensor:
        """Attend to prefetched tokens and the tail, and count the tokens on the device."""
        pool, scoring, tail = self._stored()
        selection = prefetch.selection
        # The copy of a prefetch has no rows
        fetched = prefetch.rows or start_fetch(pool, selection, plan)
        assert fetched is not None, "pages have addresses"
        own_mask = None if mask is None else mask[:, 0, -1]
        assert self._num_fetched is not None
        self._num_fetched = self._num_fetched.to(query.device, non_blocking=True)
        with plan.on_device():
            states = scoring.states_by(plan, fetched.wait(), selection, pool)
            output = plan.attend(query, states, selection, tail, pool.num_slots, own_mask, self._num_fetched)
        self._count_step(selection)
        return output

    def attend_selection(self, call: AttentionCall, selection: Selection, fetched: StagedRows | None) -> torch.Tensor:
        """
        Attend with one new token to the tokens selected for it and the tail, `[B, H, G, E]`. The call's queries are
        `[B, H, G, D]`, its mask `[B, H or 1, G or 1, tokens]`, its sinks `[B or 1, H, G, 1]`, and it has a scale.
        """
        pool, scoring, tail = self._stored()
        assert call.scale is not None
        query = call.query
        mask = call.mask
        newest = tail.keys, tail.values
        slots = selection.slots
        kernel, is_fallback = choose_rows_kernel(query, newest[1].shape[3], newest[0].dtype)
        self._counters["kernel_fallbacks"] += is_fallback and not pool.pin_memory
        if fetched is None and kernel == "compiled" and call.is_plain and (mask is None or mask.shape[1:3] == (1, 1)):
            output = scoring.attend(call, selection, pool, newest, pool.num_tokens)
            if output is not None:
                self._counters["fused_calls"] += not pool.pin_memory
                if mask is None:
                    self._plan_next_steps(query, call.scale)
                return output
        rows = pool.gather(slots) if fetched is None else fetched.wait()
        states = scoring.dense(rows, slots, pool)
        positions = None if mask is None else pool.positions_of(slots)
        return attend_fetched(call, states, selection.count, newest, pool.num_tokens, positions)

    def _plan_next_steps(self, query: torch.Tensor, scale: float) -> None:
        """Plan the next steps if the last two were over one pool; they are not while beams are reordered."""
        pool, scoring, tail = self._stored()
        config = self.config
        is_plain = config.min_weight is not None and self.padding is None and pool.usage is None
        if is_plain and not config.speculates_on(query.device):
            if pool.was_attended:
                steps = scoring.prepare_steps(query, scale, pool, tail.tensors())
                self._plan = None if steps is None else SelectionPlan(steps, config, pool.num_slots, pool.version)
            pool.was_attended = True

    def run_plan(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        plan = self._plan
        pool = self.pool
        tail = self.tail
        if pool is None or tail is None or not isinstance(plan, SelectionPlan) or plan.version != pool.version:
            return None
        if self._num_new != 1 or num_tokens != self._length or query.requires_grad:
            return None
        output = plan.attend(query, scale, tail)
        if output is not None:
            counters = self._counters
            counters["attend_calls"] += 1
            counters["selected_calls"] += 1
            counters["fused_calls"] += 1
            batch_size, num_heads, _, _ = self._shapes["keys"]
            counters["tokens_fetchable"] += num_tokens * batch_size * num_heads
            counters["tokens_fetched"] += plan.num_selected
        return output

    def _record_use(self, selection: Selection) -> None:
        """Count the tokens that were fetched, and record their use in a limited pool."""
        pool, _, _ = self._stored()
        self._count_step(selection)
        count = selection.count.sum()
        assert self._num_fetched is not None
        # Not in place: a tensor of inference mode cannot be written to outside of it
        self._num_fetched = self._num_fetched.to(count.device, non_blocking=True) + count
        if pool.usage is not None:
            pool.usage.touch(selection.slots.to("cpu"), selection.valid.to("cpu"))

    def _count_step(self, selection: Selection) -> None:
        """Count a step and the tokens that could have been fetched."""
        num_sequences, num_heads = selection.count.shape
        num_tokens = self._length * num_sequences - self._left_padding.total()
        self._counters["selected_calls"] += 1
        self._counters["tokens_fetchable"] += num_tokens * num_heads

    def _refuse_evicted(self) -> None:
        if self._counters["tokens_evicted"]:
            raise ValueError(
                "a cache that has evicted tokens cannot be made dense: use `sdpa` attention, or no `pool_tokens`"
            )

    def to_dense(self, side: str) -> torch.Tensor:
        self._refuse_evicted()
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        for keys, values, start, stop in self._iter_dense():
            dense[:, :, start:stop] = keys if side == "keys" else values
        return dense

    def _drop_newest(self, count: int) -> None:
        self._prefetch = None
        length = self._length - count
        if length < self.num_offloaded:
            self.invalidate_plan()
            pool, scoring, _ = self._stored()
            pool.truncate(length)
            scoring.truncate(pool.num_slots)
        if self.tail is not None:
            self.tail.drop_last(min(count, self.tail.length))

    def _copied(self) -> dict[str, object]:
        pool = copy.copy(self.pool)
        if pool is not None:
            pool.usage = copy.copy(pool.usage)
        return {**super()._copied(), "pool": pool, "scoring": copy.copy(self.scoring), "tail": copy.copy(self.tail)}

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.invalidate_plan()
        self._prefetch = None
        for stored in (self.pool, self.scoring, self.tail):
            if stored is not None:
                stored.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.tail is not None:
            for tensor in self.tail.tensors():
                yield "residual", tensor
        for stored in (self.pool, self.scoring):
            if stored is not None:
                yield from stored.named_tensors()
        if self._num_fetched is not None:
            yield "index", self._num_fetched

    def host_tensors(self) -> Iterator[torch.Tensor]:
        tensors = () if self.pool is None else self.pool.named_tensors()
        return (tensor for _, tensor in tensors if not tensor.is_cuda)

    def offload(self) -> None:
        """Do nothing: all that can be in host memory is there already."""

    prefetch = offload

    def _move_to(self, device: torch.device) -> None:
        self.invalidate_plan()
        self._plan = None
        self._prefetch = None
        for stored in (self.scoring, self.tail):
            if stored is not None:
                stored.map(lambda tensor: tensor.to(device))
        if self.pool is not None:
            self.pool.move_to_device(device)
        if self.padding is not None:
            self.set_padding(self.padding.to(device))
        # At the end, so that the next update goes on where memory ended
        self.device = device

    def stats(self) -> Mapping[str, float]:
        pool = self.pool
        counters = dict(self._counters)
        if self._num_fetched is not None:
            counters["tokens_fetched"] += int(self._num_fetched)
        if pool is not None:
            counters["bytes_fetched"] = counters["tokens_fetched"] * pool.row_dim * pool.dtype.itemsize
        held = {"tokens_cached": self._length, "tokens_pooled": 0 if pool is None else pool.num_slots}
        return {**held, **counters}


def _warn_of_fetching_all() -> None:
    warn_user(
        "the whole cache is fetched for every token, as attention weights are read, or attention does not show its "
        "queries to the cache, or is over projections of what is cached: exact, and slow. Leave `output_attentions` "
        "out; `model.set_attn_implementation('sdpa')` may fetch less"
    )


def _mask_of_slots(attn_mask: torch.Tensor | None, positions: torch.Tensor, length: int, groups: int) -> torch.Tensor:
    """Return the columns of a mask for slots whose positions depend on the head, `[B, H * G, Q or 1, slots]`."""
    positions = positions.repeat_interleave(groups, dim=1)[:, :, None]
    held = positions >= 0
    if attn_mask is None:
        return held
    mask = attn_mask.expand(*positions.shape[:2], attn_mask.shape[-2], length)
    mask = mask.gather(3, positions.clamp(min=0).expand(-1, -1, mask.shape[2], -1))
    return mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
