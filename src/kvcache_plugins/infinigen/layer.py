"""One layer of an InfiniGen cache: when tokens move to host memory, and which of them a decode step attends to.

A decode step: while the layer before computes, `speculate` is given the queries that this layer is expected to ask
with, chooses tokens and starts to fetch them; `attend` waits for those and attends to them and the window. Several new
tokens at once attend to everything, page by page.

On a GPU the host asks for nothing that is computed in a step: not which tokens were chosen, nor how many. All shapes
follow from lengths that it knows; what is counted is counted there. A limited pool is the exception: whose use is kept
account of on the host, which waits for every choice.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.contexts import in_own_context
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.ops.attention import attend
from kvcache_plugins.ops.masking import slice_mask
from kvcache_plugins.ops.online_softmax import OnlineAttention
from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.user_warnings import warn_user

from .config import InfiniGenConfig
from .counters import DeviceCounters, TransferTimes
from .exact_store import ExactStore
from .fetching import Fetch, attended_columns, choose_tokens, count_hits, max_forced
from .offloaded_tokens import OffloadedTokens
from .pool import TokenPool
from .prefetch import start_fetch
from .selected_attention import attend_selected
from .selection import Selection, most_chosen
from .token_store import TokenStore


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
        store (`TokenStore`, *optional*):
            An empty store for older tokens, which says in which form they stand there. As they are, if not given.

    Attributes:
        tokens (`OffloadedTokens`): what is held.
        check_queries (`Callable`, *optional*): compares the prompt's queries with what speculation makes of their
            input; held for one forward only.
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

    def __init__(
        self,
        config: InfiniGenConfig,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        store: TokenStore | None = None,
    ):
        self.config = config
        self.tokens = OffloadedTokens(ExactStore(config) if store is None else store, config.recent)
        super().__init__(layer_idx, attention_mask)
        self._start_counting()

    def _clear(self) -> None:
        super()._clear()
        self.tokens.clear()
        self._fetch: Fetch | None = None
        # Queries of the prompt, `[B, H * G, tokens, D]`, while columns are chosen by them
        self._prompt_queries: torch.Tensor | None = None
        self.check_queries: Callable[[torch.Tensor], None] | None = None

    def _start_counting(self) -> None:
        self._device_counters = DeviceCounters()
        self._times = TransferTimes() if self.config.track_times else None

    def reset(self) -> None:
        super().reset()
        self._start_counting()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.tokens.store.lazy_initialization(key_states, value_states)
        super().lazy_initialization(key_states, value_states)

    @property
    def pool(self) -> TokenPool | None:
        """What stands in host memory, once anything does."""
        return self.tokens.store.pool

    @property
    def needs_prompt_attention(self) -> bool:  # type: ignore[override]
        """Columns of the scoring copy are chosen by the prompt's queries."""
        return self.config.partial_ratio is not None

    @property
    def wants_speculation(self) -> bool:
        """Whether there is anything to fetch for a next single token."""
        return self._pending is None and self.pool is not None

    def most_fetched_bytes(self) -> int:
        """Bytes that a next step fetches at most."""
        pool = self.pool
        if pool is None:
            return 0
        most = most_chosen(self.config, self._length + 1, max_forced(self.config), pool.num_slots)
        return self.batch_size * pool.num_heads * most * pool.row_dim * pool.dtype.itemsize

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        self.tokens.add_prompt(keys, values, self._left_padding, self._prompt_queries)
        self._after_moving()
        self._prompt_queries = self.check_queries = None

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.tokens.append(keys, values)

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        window = self.tokens.window
        return None if self.pool is not None or window is None else (window.keys, window.values)

    def _append_token(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        tokens = self.tokens
        if self.pool is not None or tokens.window is None or tokens.is_window_full:
            return None
        return tokens.window.append_exactly(keys, values)

    def _before_update(self) -> None:
        self.tokens.flush(self._left_padding)
        self._after_moving()

    def _after_moving(self) -> None:
        if self.pool is not None:
            self._counters["tokens_evicted"] = self.tokens.store.num_evicted
            # What is held does not depend on whether a token has been fetched yet
            self._device_counters.start("tokens_fetched", self.device)

    def on_exact_attention(self, call: AttentionCall) -> None:
        # Queries of what is projected are of other heads
        if call.project is None:
            if self.check_queries is not None:
                check, self.check_queries = self.check_queries, None
                check(call.query)
            if self.config.partial_ratio is not None:
                self._prompt_queries = call.query
        super().on_exact_attention(call)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, Mapping[str, torch.Tensor]]]:
        self._refuse_evicted()
        if self.pool is not None and self._num_new == 1:
            _warn_of_all()
        self._counters["exact_calls"] += 1
        for keys, values, start, stop in self.tokens.stretches():
            yield slice(start, stop), {"keys": keys, "values": values}
        if self._pending is not None:
            keys, values = self._pending
            yield slice(self._length - keys.shape[2], self._length), {"keys": keys, "values": values}

    def on_dense_read(self, side: str) -> None:
        if self.pool is not None:
            _warn_of_all()
        super().on_dense_read(side)

    @in_own_context
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
        self._fetch = self._start_fetch(query, attn_mask, scale, self._length + 1)
        self._counters["speculated_calls"] += 1

    def _start_fetch(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float, length: int) -> Fetch:
        """Chooses tokens for a query when the sequence has `length` tokens, and starts to fetch them."""
        pool = self.pool
        assert pool is not None
        query = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3]).float() * scale
        if attn_mask is not None:
            columns: torch.Tensor | None = attended_columns(attn_mask, length, self.batch_size)
        else:
            columns = self._valid_tokens(0, length)
        selection = choose_tokens(query, self.tokens, columns, length, self.config)
        pool.expect(selection.slots, selection.count)
        return Fetch(selection, length, start_fetch(pool, selection, self._times))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query, mask = call.query, call.mask
        scale = query.shape[3] ** -0.5 if call.scale is None else call.scale
        self._counters["attend_calls"] += 1
        if self._num_new == 1 and self.wants_speculation:
            is_shared = mask is None or mask.dim() < 3 or mask.shape[-3] == 1
            if is_shared and call.is_plain:
                return self._attend_selected(query, mask, scale)
            if query.shape[2] == 1:
                return self._attend_selected_densely(replace(call, scale=scale), mask if is_shared else None)
        heads = self._shapes["keys"][1]
        parts = self._parts(call.full_mask(self._length), query.shape[1] // heads)
        output = attend(query, parts, heads, scale, softcap=call.softcap, sinks=call.sinks)
        self._counters["exact_calls"] += 1
        self._learn_padding(mask)
        self.settle_prompt()
        return output

    def _parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """Everything held, with its columns of the mask."""
        yield from self.tokens.parts(attn_mask, groups)
        if self._pending is not None:
            keys, values = self._pending
            yield DensePart(keys, values, keys.shape[2], attn_mask)

    def _attend_selected(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Attention of one new token over what was fetched for it and the window."""
        pool = self.pool
        assert pool is not None
        fetch = self._fetch_for(query, attn_mask, scale)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(self.batch_size, 1, attn_mask.shape[-2], self._length)[:, 0, 0]
        rows = query.reshape(self.batch_size, pool.num_heads, -1, query.shape[3])
        output, kernel, is_fallback = attend_selected(rows, fetch, self.tokens, attn_mask, scale, self._times)
        if kernel is not None:
            self._counters["fused_calls"] += kernel != "torch"
            self._counters["kernel_fallbacks"] += is_fallback
        self._note(fetch.selection, rows, scale)
        return output.reshape(*query.shape[:3], -1)

    def _attend_selected_densely(self, call: AttentionCall, shared_mask: torch.Tensor | None) -> torch.Tensor:
        """The same under what kernels do not know: a mask of which every head has its own, a softcap or sinks."""
        tokens, window, heads = self.tokens, self.tokens.window, self._shapes["keys"][1]
        pool = tokens.store.pool
        assert pool is not None and window is not None and call.scale is not None
        fetch = self._fetch_for(call.query, shared_mask, call.scale)
        selection = fetch.selection
        staged = fetch.staged or start_fetch(pool, selection, self._times)
        if staged is None:
            rows = tokens.store.dense_rows(pool.gather(selection.slots), selection.slots)
        else:
            with staged as on_device:
                rows = tokens.store.dense_rows(on_device, selection.slots).clone()
        key_dim = window.keys.shape[3]
        # Zero times what stands in no row may be NaN
        rows = rows.masked_fill(~selection.valid[..., None], 0)
        keys = torch.cat([rows[..., :key_dim], window.keys], dim=2)  # [B, H, K + W, D]
        values = torch.cat([rows[..., key_dim:], window.values], dim=2)
        newest = torch.arange(tokens.num_pooled, tokens.length, device=keys.device).expand(*keys.shape[:2], -1)
        positions = torch.cat([pool.positions_of(selection.slots, slice(None)), newest], dim=2)
        valid = torch.cat([selection.valid, torch.ones_like(newest, dtype=torch.bool)], dim=2)
        groups = call.query.shape[1] // heads
        mask = valid.repeat_interleave(groups, dim=1)[:, :, None]  # [B, H * G, 1, K + W]
        if call.mask is not None:
            index = positions.clamp(min=0).repeat_interleave(groups, dim=1)[:, :, None]
            columns = slice_mask(call.mask, 0, self._length)
            assert columns is not None
            seen = columns.expand(*index.shape[:2], 1, -1).gather(3, index)
            mask = mask & seen if seen.dtype == torch.bool else seen.masked_fill(~mask, -torch.inf)
        attention = OnlineAttention(call.query, heads, call.scale, call.softcap, call.sinks)
        attention.add_tile(keys, values, mask)
        self._note(selection, call.query.reshape(self.batch_size, heads, groups, -1), call.scale)
        return attention.result()

    def _fetch_for(self, query: torch.Tensor, attn_mask: torch.Tensor | None, scale: float) -> Fetch:
        """What was speculated for this token; if nothing was, what its own query chooses."""
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.length != self._length:
            fetch = self._start_fetch(query, attn_mask, scale, self._length)
        return fetch

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
            hits = count_hits(self.tokens.store, selection, query.float() * scale, self._left_padding)
            on_device.add("hits", hits)
            on_device.add("hits_possible", selection.count.sum())

    def _refuse_evicted(self) -> None:
        if self._counters["tokens_evicted"]:
            raise ValueError(
                "a cache that has evicted tokens cannot be made dense: use `sdpa` attention, or no `pool_tokens`"
            )

    def materialize(self, side: str) -> torch.Tensor:
        self._refuse_evicted()
        number = 0 if side == "keys" else 1
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        for *states, start, stop in self.tokens.stretches():
            dense[:, :, start:stop] = states[number]
        if self._pending is not None:
            dense[:] = self._pending[number]
        return dense

    def _drop_newest(self, count: int) -> None:
        self._fetch = None
        self.tokens.drop_newest(count)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._fetch = None
        self.tokens.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tokens.named_tensors()
        for tensor in self._device_counters.tensors():
            yield "index", tensor

    def host_tensors(self) -> Iterator[torch.Tensor]:
        return iter(()) if self.pool is None else self.pool.host_tensors()

    def offload(self) -> None:
        """Nothing: what can stand in host memory does so already."""

    def prefetch(self) -> None:
        """Nothing: tokens are fetched when they have been chosen."""

    def _move_to(self, device: torch.device) -> None:
        self._fetch, self.device = None, device
        self.tokens.serve(device)
        if self.padding is not None:
            self.padding = self.padding.to(device)

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


def _warn_of_all() -> None:
    warn_user(
        "the whole cache is fetched for every token, as attention does not show its queries to the cache, or is over "
        "projections of what is cached: exact, and slow. `model.set_attn_implementation('sdpa')` may fetch less"
    )
