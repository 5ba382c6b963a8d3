"""Layers of packed tokens: attention over all of them, rollbacks, copies and files.

    [ prefix: exact, first tokens ] [ segments: packed, the last perhaps with more bits ] [ tail: exact, newest ]

Two rules say when a token is packed. A prompt is committed right after its attention, layer by layer, so that at most
one layer's prompt is dense at a time; the codec that packs all later tokens is fitted to it. Decoded tokens are packed
at the beginning of the next update, so that a rollback (`crop`) finds them exact.

Legend: B batch, H key/value heads, Q queries, T tokens, D head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, NamedTuple

import torch

from kvcache_plugins.formats.parts import DensePart, LayerPart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.kernels.masks import combine_masks, hide_first, mask_columns, slice_mask
from kvcache_plugins.kernels.ops import decode_tiles, to_dtype

from .exact_tokens import ExactPrefix, ExactTail
from .layer_state import ExactStates, LayerState, SegmentState
from .lazy_kv import make_lazy_kv
from .lazy_layer import LazyLayer, MaskedTiles
from .phase import Phase
from .policies import AnyCodec, LayerPolicy
from .step_plan import StepPlan, plan_steps
from .storage import AnySegment, LayerStorage
from .torch_contexts import without_caller_contexts


# An update of this many times `residual_length` tokens is a prompt of its own
_PROMPT_FACTOR = 4
# Columns of a kept mask are a multiple of this: a single column would broadcast
_MASK_STEP = 8


class DenseLimits(NamedTuple):
    """
    Lengths of a dense layer.

    Attributes:
        num_first (`int`): first tokens, which become the prefix.
        limit (`int`): length at which the next update packs tokens.
        first_recorded (`int`): length behind which the layer records queries.
    """

    num_first: int
    limit: int
    first_recorded: int


NOT_DENSE = DenseLimits(0, 0, 0)


class CompressedLayer(LazyLayer, Generic[AnySegment, AnyCodec]):
    """
    Keys and values of one layer. `RowLayer` and `GroupLayer` pack them.

    Args:
        policy (`LayerPolicy`): when tokens are packed.
        layer_idx, attention_mask: as in `LazyLayer`.

    Attributes:
        storage (`LayerStorage`): all tokens but those of an uncommitted prompt.
        codec (*optional*): how packed tokens are read, once it is fitted.
        plan (`StepPlan`, *optional*): attention of the next step, prepared.
        on_first_prompt (`Callable`, *optional*): called with the layer and queries before its first prompt is packed.
    """

    counter_names = (
        *("tokens_compressed", "chunks_compressed", "attend_calls", "fused_calls", "kernel_fallbacks"),
        "prompts_without_mask",
    )
    policy: LayerPolicy[AnyCodec]
    # Queries that compiled kernels take
    max_compiled_queries: int
    on_first_prompt: Callable[[CompressedLayer[AnySegment, AnyCodec], torch.Tensor], None] | None = None

    def __init__(
        self, policy: LayerPolicy[AnyCodec], layer_idx: int, attention_mask: torch.Tensor | None = None
    ) -> None:
        self.policy = policy
        super().__init__(layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.storage: LayerStorage[AnySegment] = LayerStorage()
        self.codec: AnyCodec | None = None
        self.plan: StepPlan | None = None
        self._dense = NOT_DENSE

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        codec = self.policy.codec(key_states.shape[3], value_states.shape[3])
        try:
            codec.check_shapes(key_states, value_states)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_idx}: {error}") from None
        self._unfitted: AnyCodec = codec
        super().lazy_initialization(key_states, value_states)

    @property
    def phase(self) -> Phase:
        phase = super().phase
        storage = self.storage
        is_dense = not storage.segments and storage.prefix is None and not storage.first_held
        return Phase.DENSE if phase is Phase.STORED and is_dense else phase

    @property
    def exact_start(self) -> int:
        """Position of the first token behind the packed ones."""
        num_uncommitted = 0 if self._uncommitted_prompt is None else self._uncommitted_prompt.keys.shape[2]
        return self._length - num_uncommitted - self.storage.tail_length

    def _exact_tail(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield keys, values and the number of tokens in use of the tail and of an uncommitted prompt."""
        tail: ExactTail | None = self.storage.tail
        if tail is not None and tail.length:
            keys, values = tail.tensors()
            yield keys, values, tail.length
        if self._uncommitted_prompt is not None:
            keys, values, _ = self._uncommitted_prompt
            yield keys, values, keys.shape[2]

    @property
    def _tail_limit(self) -> int:
        """Number of tokens in the tail at which the next update packs."""
        # The codec is not fitted before there are enough tokens
        limit = self.policy.residual_length
        return limit if self.codec is not None else max(limit, self.policy.least_tokens)

    def _is_prompt(self, count: int) -> bool:
        return 0 < _PROMPT_FACTOR * self.policy.residual_length <= count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LazyLayer.update`: stores a token like the last one here, if no more is to be done."""
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled():
            return super().update(key_states, value_states)
        kind = key_states.shape, value_states.shape, key_states.dtype, value_states.dtype, key_states.device
        tail = self.storage.tail
        if tail is None or kind != tail.token_kind or self._num_new != 1:
            return super().update(key_states, value_states)
        if self.handed_out.scores or self.handed_out.has_gradients:
            return super().update(key_states, value_states)
        if self._length < self._dense.limit:
            states = tail.append_exactly(key_states, value_states)
            self._length += 1
            return states if self._length <= self._dense.first_recorded else self._lazy(states)
        plan = self.plan
        if plan is None or plan.version != self.storage.version:
            return super().update(key_states, value_states)
        if tail.length >= plan.limit and not self._pack_by_plan(plan):
            return super().update(key_states, value_states)
        can_wait = plan.writes_newest and tail.unwritten is None and tail.length < tail.capacity
        if can_wait and key_states.is_contiguous() and value_states.is_contiguous():
            tail.unwritten = key_states, value_states
            tail.length += 1
        elif not plan.push(tail, key_states, value_states):
            if torch.is_inference_mode_enabled():
                return super().update(key_states, value_states)
            tail.append(key_states, value_states)
        self._length += 1
        return make_lazy_kv(self, kind[0], kind[1], self._length, self.dtype, self.device)

    def _pack_by_plan(self, plan: StepPlan) -> bool:
        """Pack the oldest tokens of the tail in place. Return False if the general update has to."""
        return False

    def _before_update(self) -> None:
        tail = self.storage.tail
        if tail is not None and tail.length - self._dense.num_first >= self._tail_limit:
            self._commit_tail()

    def _commit_tail(self) -> None:
        """Pack decoded tokens of the tail."""
        with self._all_or_nothing():
            self._leave_dense()
            tail = self.storage.tail
            if tail is not None:
                self._commit(tail.keys, tail.values, is_prompt=False)
                self._enter_dense()

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.policy.residual_length and self.codec is not None:
            # Packed as they come; they are not counted yet
            with self._all_or_nothing():
                self._length += keys.shape[2]
                self._commit(keys, values, is_prompt=False)
                self._length -= keys.shape[2]
        elif self.storage.tail is None:
            self.storage.tail = ExactTail(keys, values, self.policy.residual_length)
        elif self.phase is Phase.DENSE:
            self.storage.tail.append_exactly(keys, values)
        else:
            self.storage.tail.append(keys, values)

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        self._leave_dense()
        self.invalidate_plan()
        tail = self.storage.tail
        if tail is not None and tail.length:
            keys = torch.cat([tail.keys, keys], dim=2)
            values = torch.cat([tail.values, values], dim=2)
        self._commit(keys, values, is_prompt=True)
        self._enter_dense()

    def invalidate_plan(self) -> None:
        """Invalidate the plan, and free what it holds: stored tokens, or what is known of them, will change."""
        self.storage.version += 1
        self.plan = None

    @abstractmethod
    def _commit(self, keys: torch.Tensor, values: torch.Tensor, *, is_prompt: bool) -> None:
        """
        Pack exact tokens `[B, H, T, D]`, all behind the packed ones; the tail keeps what cannot be packed. Callers
        undo its changes if it raises.
        """

    def _mark_packable(self, start: int, keys: torch.Tensor, first_end: torch.Tensor | None) -> torch.Tensor | None:
        """
        Mark tokens `[B, T]` from position `start` on that are neither padding nor in the prefix, which ends at
        `first_end` `[B]` if it is new; `None` if all are.
        """
        prefix, count = self.storage.prefix, keys.shape[2]
        if prefix is None or start >= self.storage.prefix_stop:
            return self._left_padding.valid_tokens(start, count, self.device)
        # With its data even where states have none
        end = first_end if first_end is not None and keys.is_meta else prefix.end
        if first_end is None and self.padding is not None:
            # Padding of a sequence that `crop` left without tokens may have grown since
            end = end.maximum(self.padding.to(end.device))
        return torch.arange(start, start + count, dtype=torch.int64, device=end.device) >= end[:, None]

    def _enter_dense(self) -> None:
        """Hold all tokens in the tail, if none is packed and none has to be masked."""
        storage, prefix = self.storage, self.storage.prefix
        if storage.segments or storage.first_held or (prefix is not None and not prefix.is_uniform):
            return
        num_first = self._dense.num_first
        if prefix is not None:
            keys, values = prefix.keys, prefix.values
            if storage.tail is not None:
                keys = torch.cat((keys, storage.tail.keys), dim=2)
                values = torch.cat((values, storage.tail.values), dim=2)
            storage.tail = ExactTail(keys, values, self.policy.residual_length)
            storage.set_prefix(None)
            num_first = prefix.num_slots
        if storage.tail is not None:
            self._set_dense(num_first)

    def _set_dense(self, num_first: int) -> None:
        """Set the lengths of a dense layer whose `num_first` first tokens become the prefix."""
        limit = num_first + self._tail_limit
        if self.sliding_window is not None:
            limit = min(limit, self.sliding_window)
        self._dense = DenseLimits(num_first, limit, limit - self._num_recorded_queries)

    def _leave_dense(self) -> None:
        """Make a prefix of a dense layer's first tokens, as packed tokens will follow."""
        if self._dense.num_first:
            prefix, tail = self._dense_ends()
            self.storage.set_prefix(prefix)
            self.storage.tail = tail
        self._dense = NOT_DENSE

    def _dense_ends(self) -> tuple[ExactPrefix | None, ExactTail | None]:
        """Split the tail of a dense layer into the tokens that become the prefix and the others."""
        tail, count = self.storage.tail, self._dense.num_first
        if not count or tail is None:
            return self.storage.prefix, tail
        keys, values = tail.keys, tail.values
        padding = torch.zeros(self.batch_size, dtype=torch.int64, device="cpu")
        prefix = ExactPrefix.of(keys, values, padding, padding + count)
        if tail.length == count:
            return prefix, None
        return prefix, ExactTail(keys[:, :, count:], values[:, :, count:], self.policy.residual_length)

    @property
    def _num_recorded_queries(self) -> int:
        """Tokens before the first packing whose queries are recorded."""
        return 0

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        tail = self.storage.tail
        skipped = self._first_visible - self.exact_start
        if self.phase is not Phase.DENSE or tail is None or skipped < 0:
            return None
        return tail.keys[:, :, skipped:], tail.values[:, :, skipped:]

    def _set_tail(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        """
        Keep the newest `count` of the exact tokens `[B, H, T, D]` in the tail. A tail that holds no others is
        shortened; otherwise they are a prompt's and those of the tail before it, and a new tail is made.
        """
        storage, num_dropped = self.storage, keys.shape[2] - count
        if not count:
            storage.tail = None
        elif storage.tail is None or storage.tail.length != keys.shape[2]:
            storage.tail = ExactTail(keys[:, :, num_dropped:], values[:, :, num_dropped:], self.policy.residual_length)
        elif num_dropped:
            storage.tail.drop_first(num_dropped)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if not self.policy.residual_length:
            # Attention is over packed tokens
            self._learn_padding(call.mask)
            self.commit_prompt()
        query, mask, heads = call.query, call.full_mask(self.lazy_length()), self._shapes["keys"][1]
        kernel, is_fallback = "torch", False
        if call.is_plain and self._unfitted.has_kernels:
            kernel, is_fallback = choose_kernel(query, self.max_compiled_queries, self._unfitted.shared_formats)
        output = self._attend_by_plan(query, call.scale, kernel) if mask is None and kernel != "torch" else None
        if output is None:
            output = attend(query, self._parts(mask), heads, call.scale, kernel, call.softcap, call.sinks)
            self._counters["attend_calls"] += 1
            self._counters["fused_calls"] += kernel != "torch"
            self._counters["kernel_fallbacks"] += is_fallback
        self.on_exact_attention(call)
        return output

    def run_plan(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        plan, tail = self.plan, self.storage.tail
        if plan is None or tail is None or num_tokens != self._length or plan.version != self.storage.version:
            return None
        if query.requires_grad:
            return None
        output = plan.attend(query, scale, tail)
        if output is not None:
            self._counters["attend_calls"] += 1
            self._counters["fused_calls"] += 1
        return output

    def _attend_by_plan(self, query: torch.Tensor, scale: float | None, kernel: str) -> torch.Tensor | None:
        """Plan attention for this and later steps, and run it. `None` if more than the tail may change."""
        storage, plan = self.storage, self.plan
        is_steady = self._uncommitted_prompt is None and self.sliding_window is None and not self._records_queries
        if not is_steady or not storage.segments or not storage.tail_length or torch.compiler.is_dynamo_compiling():
            return None
        if plan is not None and plan.version == storage.version:
            output = self.run_plan(query, self._length, scale)
            if output is not None or not plan.is_of_queries:
                return output
        parts = list(self._parts(None))
        self.plan = plan_steps(query, parts, self._shapes["keys"][1], scale, kernel, storage.version, self._tail_limit)
        return self.run_plan(query, self._length, scale)

    def on_exact_attention(self, call: AttentionCall) -> None:
        self._learn_padding(call.mask)
        query = call.query.detach() if call.query.requires_grad else call.query
        if call.project is None:
            # Queries of projected states have other heads
            if self.on_first_prompt is not None and self._uncommitted_prompt is not None and self.codec is None:
                self.on_first_prompt(self, query)
            if self._records_queries:
                self._record_queries(query)
        if self._uncommitted_prompt is not None:
            self.commit_prompt()

    def _record_queries(self, query: torch.Tensor) -> None:
        """Record queries for the fit of the codec."""
        raise NotImplementedError

    @abstractmethod
    def _part(self, segment: AnySegment, mask: torch.Tensor | None) -> LayerPart:
        """Make the part that attention over a segment reads, with its columns of the mask."""

    def _parts(self, attn_mask: torch.Tensor | None) -> Iterator[LayerPart]:
        """Yield everything held, each token once, with its columns of the mask."""
        yield from self.packed_parts(attn_mask)
        position, first = self.exact_start, self._first_visible
        for keys, values, length in self._exact_tail():
            if position + length > first:
                yield DensePart(keys, values, length, self._columns(attn_mask, position, position + length))
            position += length

    def packed_parts(self, attn_mask: torch.Tensor | None) -> Iterator[LayerPart]:
        """Yield prefix and segments, with their columns of the mask."""
        storage, first = self.storage, self._first_visible
        prefix = storage.prefix
        if prefix is not None and prefix.num_slots:
            mask = None
            if attn_mask is not None:
                mask = mask_columns(attn_mask, prefix.positions - first, self.batch_size, self._length - first)
            if not prefix.is_uniform or first:
                mask = combine_masks(mask, prefix.in_use & (prefix.positions >= first))
            yield DensePart(prefix.keys, prefix.values, prefix.num_slots, mask)
        for segment in storage.segments:
            stop = segment.stop
            if stop <= first or not segment.length:
                continue
            mask = self._columns(attn_mask, segment.start, stop)
            if prefix is not None and segment.start < storage.prefix_stop:
                if mask is None and self.device.type == "cpu":
                    # No longer than needed, as a plan keeps it
                    stop = min(stop, -(-int(prefix.end.max()) // _MASK_STEP) * _MASK_STEP + segment.start)
                columns = torch.arange(segment.start, stop, dtype=torch.int64, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            yield self._part(segment, mask)

    def _columns(self, attn_mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
        """Slice the mask's columns of tokens from position `start` to `stop`; some may be out of sight."""
        first = self._first_visible
        if start >= first:
            return slice_mask(attn_mask, start - first, stop - first)
        return hide_first(slice_mask(attn_mask, 0, stop - first), first - start, stop - start, self.device)

    def to_dense(self, side: str) -> torch.Tensor:
        first, position = self._first_visible, self.exact_start
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        held = [(segment.start, self._part(segment, None)) for segment in self.storage.segments]
        for keys, values, length in self._exact_tail():
            held.append((position, DensePart(keys, values, length, None)))
            position += length
        for position, part in held:
            for keys, values, start, stop in decode_tiles(part, {side}):
                states = (keys if side == "keys" else values)[:, :, max(first - position - start, 0) :]
                end = max(position + stop - first, 0)
                dense[:, :, end - states.shape[2] : end] = to_dtype(states, self.dtype)
        # Last, as segments may span tokens of the prefix
        if self.storage.prefix is not None:
            self.storage.prefix.write_dense(side, dense, first)
        return dense

    def iter_dense(self, mask: torch.Tensor | None) -> MaskedTiles:
        for part in self._parts(mask):
            for keys, values, start, stop in decode_tiles(part):
                columns = slice_mask(part.mask, start, stop)
                yield to_dtype(keys, self.dtype), to_dtype(values, self.dtype), columns

    def _drop_newest(self, count: int) -> None:
        stop = self._length - count
        if stop < self.exact_start:
            self.invalidate_plan()
        self.storage.drop_newest(stop, self.exact_start)
        if self._dense.num_first > stop:
            self._set_dense(stop)

    def _copied(self) -> dict[str, object]:
        # Before the attributes: to read the storage of a static layer may change them
        storage = self.storage.copy()
        return {**super()._copied(), "storage": storage}

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.invalidate_plan()
        self.storage.map(function)
        if self.codec is not None:
            self.codec = self.codec.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.storage.segment_tensors()
        if self.codec is not None:
            yield from (("scales", tensor) for tensor in self.codec.tensors())
        yield from self.storage.exact_tensors()

    def share(self) -> Iterator[torch.Tensor]:
        """Close all segments, and yield tensors that a copy of this layer may share: neither writes to them."""
        self.commit_prompt()
        self.invalidate_plan()
        self.storage.close()
        for segment in self.storage.segments:
            yield from (tensor for side in segment.sides() for tensor in side.values())
        if self.codec is not None and self._shares_codec:
            yield from self.codec.tensors()
        prefix = self.storage.prefix
        if prefix is not None:
            yield from (prefix.keys, prefix.values, prefix.start, prefix.count)

    @property
    def _shares_codec(self) -> bool:
        """True if the codec does not change any more."""
        return True

    def stats(self) -> dict[str, int]:
        lengths = {"tokens_cached": self._length, "tokens_exact": self._num_exact() if self.is_initialized else 0}
        return {**lengths, **self._counters}

    @property
    def _num_exact_in_front(self) -> int:
        """Exact tokens of the prefix, of the sequence that has most of them packed."""
        prefix = self.storage.prefix
        return 0 if prefix is None else min(prefix.num_slots, self._length)

    def _num_exact(self) -> int:
        """Count tokens held exactly, of the sequence that has most of them packed."""
        start, in_front = self.exact_start, self._num_exact_in_front
        if self.sliding_window is None:
            segments = self.storage.segments
            in_front = max(in_front, segments[0].start if segments else start)
        return self._length - start + in_front

    def state(self) -> LayerState:
        """
        Return everything that the layer holds, as it is: nothing is copied but the prefix of a dense layer. A prompt
        must be committed before.
        """
        assert self._uncommitted_prompt is None, "commit the prompt first"
        batch_size, num_heads, _, key_head_dim = self.states_shape("keys")
        segments = [each for each in self.storage.segments if each.length]
        newest = segments[-1] if segments else None
        prefix, tail = self._dense_ends()
        return LayerState(
            dtype=self.dtype,
            batch_size=batch_size,
            num_heads=num_heads,
            key_head_dim=key_head_dim,
            value_head_dim=self._shapes["values"][3],
            length=self._length,
            held_start=self.storage.first_held,
            is_open=newest is not None and newest.is_open,
            counters={name: self._counters[name] for name in self.counter_names},
            padding=self.padding,
            prefix=prefix,
            blocks=[SegmentState(each.start, each.length, *each.stored(), each.is_recent) for each in segments],
            buffer=ExactStates(tail.keys, tail.values) if tail is not None and tail.length else None,
        )

    @without_caller_contexts
    def restore(self, state: LayerState, device: torch.device, path: str = "state") -> None:
        """Take over a state that may come from anywhere, or raise a `ValueError` that names `path`."""
        if state.counters.keys() != set(self.counter_names):
            raise ValueError(f"`{path}.counters` has to be of {sorted(self.counter_names)}")
        self._unfitted = self.policy.codec(state.key_head_dim, state.value_head_dim)
        self.codec, segments = self._restore_packed(state, path)
        self._length = state.length
        self._counters.update(state.counters)
        self._set_shapes(
            (state.batch_size, state.num_heads, state.length, state.key_head_dim),
            (state.batch_size, state.num_heads, state.length, state.value_head_dim),
        )
        self.dtype = state.dtype
        self.set_padding(state.padding)
        storage: LayerStorage[AnySegment] = LayerStorage()
        storage.segments, storage.first_held = segments, state.held_start
        # A copy, as the state may be that of another layer, which changes its own prefix
        storage.set_prefix(None if state.prefix is None else replace(state.prefix))
        if state.buffer is not None:
            storage.tail = ExactTail(state.buffer.keys, state.buffer.values, self.policy.residual_length)
        self.storage, self.plan = storage, None
        self.is_initialized = True
        self.device = device
        self.map_tensors(lambda tensor: tensor.to(device))
        if self._length:
            self._enter_dense()

    @abstractmethod
    def _restore_packed(self, state: LayerState, path: str) -> tuple[AnyCodec | None, list[AnySegment]]:
        """Make codec and segments of a state; a `ValueError` that names `path` if no such layer can be in it."""
