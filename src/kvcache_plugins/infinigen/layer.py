"""One layer of an InfiniGen cache: when tokens move to host memory, and which of them a decode step attends to.

A decode step: while the layer before computes, `speculate` is given the queries that this layer is expected to ask
with, chooses tokens and starts to fetch them; `attend` waits for those and attends to them and the window. Where
nothing has to be brought, `attend` chooses by the layer's own query. Several new tokens at once attend to everything,
page by page.

On a GPU the host asks for nothing that is computed in a step: not which tokens were chosen, nor how many. All shapes
follow from lengths that it knows; what is counted is counted there. A limited pool is the exception: whose use is kept
account of on the host, which waits for every choice.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.contexts import in_own_context
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.user_warnings import warn_user

from .config import InfiniGenConfig
from .pool import TokenPool
from .selection import Selection, attended_columns, count_hits, most_chosen
from .staging import StagedRows, TransferTimes, start_fetch
from .tokens import OffloadedTokens


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
        tokens (`OffloadedTokens`, *optional*):
            Where tokens go, still empty, which says in which form they stand in the pool. As they are, if not given.

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
        tokens: OffloadedTokens | None = None,
    ):
        self.config = config
        self.tokens = OffloadedTokens(config, layer_idx) if tokens is None else tokens
        super().__init__(layer_idx, attention_mask)
        self._start_counting()

    def _clear(self) -> None:
        super()._clear()
        self.tokens.clear()
        self._fetch: Fetch | None = None
        # Queries of the prompt, `[B, H * G, tokens, D]`, while its tokens' form is told by them
        self._prompt_queries: torch.Tensor | None = None
        self.check_queries: Callable[[torch.Tensor], None] | None = None

    def _start_counting(self) -> None:
        # Sums of integers that only the device knows
        self._sums: dict[str, torch.Tensor] = {}
        self._times = TransferTimes() if self.config.track_times else None

    def reset(self) -> None:
        super().reset()
        self._start_counting()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.tokens.lazy_initialization(key_states, value_states)
        super().lazy_initialization(key_states, value_states)

    @property
    def pool(self) -> TokenPool | None:
        """Rows in host memory, once there are any."""
        return self.tokens.pool

    @property
    def needs_prompt_attention(self) -> bool:  # type: ignore[override]
        """Columns of the scoring copy are chosen by the prompt's queries."""
        return self.config.partial_ratio is not None

    @property
    def wants_speculation(self) -> bool:
        """Tells whether there is anything to fetch for a next single token."""
        return self._pending is None and self.pool is not None

    def most_fetched_bytes(self) -> int:
        """Bytes that a next step fetches at most."""
        pool = self.pool
        if pool is None:
            return 0
        most = most_chosen(self.config, self._length + 1, pool.num_slots)
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
        if tokens.window is None or tokens.is_window_full:
            return None
        if self.pool is None:
            return tokens.window.append_exactly(keys, values)
        tokens.window.append(keys, values)
        # One token more, which `update` counts when it has the states
        self._length += 1
        states = self._lazy(None, None)
        self._length -= 1
        return states

    def _before_update(self) -> None:
        self.tokens.flush(self._left_padding)
        self._after_moving()

    def _after_moving(self) -> None:
        if self.pool is not None:
            self._counters["tokens_evicted"] = self.tokens.num_evicted
            # What is held does not depend on whether a token has been fetched yet
            if "tokens_fetched" not in self._sums:
                self._sums["tokens_fetched"] = torch.zeros((), dtype=torch.int64, device=self.device)

    def on_exact_attention(self, call: AttentionCall) -> None:
        # Queries of what is projected are of other heads
        if call.project is None:
            if self.check_queries is not None:
                check, self.check_queries = self.check_queries, None
                check(call.query)
            if self.needs_prompt_attention:
                self._prompt_queries = call.query
        super().on_exact_attention(call)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, Mapping[str, torch.Tensor]]]:
        self._refuse_evicted()
        if self.pool is not None and self._num_new == 1:
            _warn_of_all()
        self._counters["exact_calls"] += 1
        for keys, values, start, stop in self._iter_dense():
            yield slice(start, stop), {"keys": keys, "values": values}

    def _iter_dense(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        yield from self.tokens.iter_dense()
        if self._pending is not None:
            yield *self._pending, self._length - self._pending[0].shape[2], self._length

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
        selection = self.tokens.choose(query, columns, length)
        pool.expect(selection.slots, selection.count)
        return Fetch(selection, length, start_fetch(pool, selection, self._times))

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
        self._learn_padding(attn_mask)
        self.settle_prompt()
        return output

    def _parts(self, attn_mask: torch.Tensor | None, groups: int) -> Iterator[DensePart]:
        """Lists everything held, with its columns of the mask."""
        yield from self.tokens.parts(attn_mask, groups)
        if self._pending is not None:
            keys, values = self._pending
            yield DensePart(keys, values, keys.shape[2], attn_mask)

    def _attend_selected(self, call: AttentionCall, scale: float) -> torch.Tensor:
        """Attention of one new token over what was fetched for it and the window."""
        query, attn_mask, pool = call.query, call.mask, self.pool
        assert pool is not None
        by_heads = self.batch_size, pool.num_heads, -1
        mask = attn_mask
        if mask is not None:
            mask = mask.expand(self.batch_size, *mask.shape[-3:-2] or (1,), mask.shape[-2], self._length)[:, :, :1]
            # A mask of which every head has its own, such as a bias of positions, takes no part in the choice
            attn_mask = attn_mask if mask.shape[1] == 1 else None
            mask = mask if mask.shape[1] == 1 else mask.reshape(*by_heads, self._length)
        # What was speculated for this token; if nothing was, what its own query chooses
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.length != self._length:
            fetch = self._start_fetch(query, attn_mask, scale, self._length)
        rows = query.reshape(*by_heads, query.shape[3])
        # A copy of a fetch has its choice and no rows
        staged = fetch.staged or start_fetch(pool, fetch.selection, self._times)
        sinks = (
            None if call.sinks is None else call.sinks.reshape(-1, pool.num_heads, query.shape[1] // pool.num_heads, 1)
        )
        output, kernel, is_fallback = self.tokens.attend(
            rows, fetch.selection, staged, mask, scale, call.softcap, sinks
        )
        if kernel is not None:
            self._counters["fused_calls"] += kernel != "torch"
            self._counters["kernel_fallbacks"] += is_fallback
        self._note(fetch.selection, rows, scale)
        return output.reshape(*query.shape[:3], -1)

    def _note(self, selection: Selection, query: torch.Tensor, scale: float) -> None:
        """Counts what was fetched, and how much of it was right."""
        pool = self.pool
        assert pool is not None
        self._counters["selected_calls"] += 1
        self._counters["tokens_fetchable"] += self._length * self.batch_size * pool.num_heads
        if self.padding is not None:
            self._add("tokens_fetchable", -pool.num_heads * self.padding.sum())
        self._add("tokens_fetched", selection.count.sum())
        if pool.usage is not None:
            pool.usage.touch(selection.slots.to("cpu"), selection.valid.to("cpu"))
        if self.config.track_hits:
            keys = self.tokens.pooled_keys()
            scores = query.float() * scale @ keys.float().transpose(2, 3)
            if self.padding is not None:
                is_padding = pool.positions(keys.device) < self.padding[:, None, None]
                scores = scores.masked_fill(is_padding[:, :, None], -torch.inf)
            self._add("hits", count_hits(selection, scores))
            self._add("hits_possible", selection.count.sum())

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
        self._fetch = None
        self.tokens.drop_newest(count)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._fetch = None
        self.tokens.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tokens.named_tensors()
        for tensor in self._sums.values():
            yield "index", tensor

    def host_tensors(self) -> Iterator[torch.Tensor]:
        return iter(()) if self.pool is None else self.pool.host_tensors()

    def offload(self) -> None:
        """Does nothing: what can stand in host memory does so already."""

    def prefetch(self) -> None:
        """Does nothing: tokens are fetched when they have been chosen."""

    def _move_to(self, device: torch.device) -> None:
        self._fetch, self.device, self._token_kind = None, device, None
        self.tokens.serve(device)
        if self.padding is not None:
            self.padding = self.padding.to(device)

    def stats(self) -> Mapping[str, float]:
        counters: dict[str, float] = dict(self._counters)
        for name, amount in self._sums.items():
            counters[name] += int(amount)
        pool = self.pool
        if pool is not None:
            counters["bytes_fetched"] = counters["tokens_fetched"] * pool.row_dim * pool.dtype.itemsize
        times: dict[str, float] = {}
        if self._times is not None:
            times = {"transfer_s": 0.0, "stalled_s": 0.0, **self._times.seconds()}
        return {
            "tokens_cached": self._length,
            "tokens_pooled": 0 if pool is None else pool.num_slots,
            **counters,
            "dense_reads": self.dense_reads,
            **times,
        }


def _warn_of_all() -> None:
    warn_user(
        "the whole cache is fetched for every token, as attention does not show its queries to the cache, or is over "
        "projections of what is cached: exact, and slow. `model.set_attn_implementation('sdpa')` may fetch less"
    )
