"""Static layers: layers of reserved capacity, for eager steps, `torch.compile` and CUDA graphs alike.

A static layer stores the same bytes in the same order as any other layer of its policy. On a GPU, Triton's kernels
store and pack tokens in place (`DevicePlan`), so that graphs can replay steps; `max_length` reserves capacity from the
first token on.

In a graph of `torch.compile` a step of a layer is one operator, `torch.ops.kvcache_plugins.static_attention`. `update`
is called before the query is known, so it returns `GraphStates`, which become the operator where attention gets them.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F

from kvcache_plugins.formats.parts import LayerPart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_token_kernel, compiles_kernels, explain_kernel, load_triton

from .compressed_layer import CompressedLayer
from .device_plan import DevicePlan, StepCounts, count_tokens, list_addresses, split_open
from .exact_tokens import ExactTail
from .layer_state import LayerState
from .phase import Phase
from .policies import AnyCodec
from .step_plan import DroppedOnCopy, StepPlan
from .storage import AnySegment, LayerStorage
from .torch_contexts import without_caller_contexts


if TYPE_CHECKING:
    from typing_extensions import Self


# Capacity that is added when there is none left: a share of the tokens held, and at least so many
_SHARE, _LEAST = 8, 64
# Tokens after which the host asks whether all of them could be coded
_CHECK_STEP = 64
# An operator is given tensors and numbers: graph states by number, as long as they are in use
_GRAPH_STATES: "WeakValueDictionary[int, GraphState]" = WeakValueDictionary()
_NUMBERS = itertools.count(1)


class GraphState(DroppedOnCopy):
    """
    Handle of a layer in graphs, which are valid as long as it is the layer's.

    Attributes:
        number (`int`): identifies the state to the operator.
        layer (`ref[StaticLayer]`): the layer.
        plan (`DevicePlan`, *optional*): plan whose addresses graphs hold; `None` without Triton's kernels.
        num_columns (`int`): capacity in tokens.
        total (`torch.Tensor` of shape `[]`): tokens of the sequence, on the device.
        order (`torch.Tensor`): dummy that the operator writes to, so that calls keep their order.
    """

    def __init__(self, layer: "StaticLayer[Any, Any]", plan: DevicePlan[Any] | None, num_columns: int) -> None:
        self.number = next(_NUMBERS)
        self.layer = ref(layer)
        self.plan = plan
        self.num_columns = num_columns
        count = torch.zeros((), dtype=torch.int64, device=layer.device)
        self.total = count if plan is None else plan.total
        self.order = torch.zeros(1, dtype=torch.int64, device=layer.device)
        torch._dynamo.mark_static_address(self.order)
        _GRAPH_STATES[self.number] = self


class StaticLayer(CompressedLayer[AnySegment, AnyCodec]):
    """
    A layer whose next token changes no address, if there is capacity for it. A class of layers has this one before
    `RowLayer` or `GroupLayer`.

    Attributes:
        max_length (`int`, *optional*): tokens that there is capacity for from the first one on. By default capacity
            grows with them, and is reserved only where kernels of a GPU compute.
        graph (`GraphState`, *optional*): present if a graph can take the next token.
    """

    graph: GraphState | None = None
    max_length: int | None = None
    _is_static = False
    _num_tokens = 0
    _host_is_behind = False

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """True if steps can be compiled: capacity is reserved for them."""
        return self.max_length is not None

    def _clear(self) -> None:
        super()._clear()
        self.graph = None
        # The newest plan and graph state, which are used again if addresses are the same
        self._device_plan: DevicePlan[AnySegment] | None = None
        self._graph: GraphState | None = None
        # Packed tokens that were checked
        self._num_checked = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._look_for_kernels()

    def restore(self, state: LayerState, device: torch.device, path: str = "state") -> None:
        super().restore(state, device, path)
        self._look_for_kernels()

    def _move_to(self, device: torch.device) -> None:
        super()._move_to(device)
        self._look_for_kernels()

    def _look_for_kernels(self) -> None:
        """Decide if capacity is reserved; a `ValueError` if `max_length` asks for it and kernels are missing."""
        has_kernels = compiles_kernels(torch.empty(0, dtype=torch.float32, device=self.device))
        reason = None
        if has_kernels:
            reason = self._explain_packing(load_triton())
            has_kernels = reason is None
        elif self.device.type == "cuda":
            reason = explain_kernel("cuda")[1] or "not chosen"
        if self.max_length is not None and reason is not None:
            raise ValueError(f"`max_cache_len` needs Triton's kernels: {reason}")
        self._is_static = has_kernels or self.max_length is not None

    @abstractmethod
    def _explain_packing(self, triton: ModuleType) -> str | None:
        """Return the reason why Triton's kernels cannot pack states like this layer's, or `None`."""

    # Lengths, which a replayed graph adds to

    @property
    def _length(self) -> int:  # type: ignore[override]
        if self._host_is_behind:
            self._sync_lengths()
        return self._num_tokens

    @_length.setter
    def _length(self, length: int) -> None:
        self._num_tokens, self._host_is_behind = length, False

    @property
    def storage(self) -> LayerStorage[AnySegment]:  # type: ignore[override]
        if self._host_is_behind:
            self._sync_lengths()
        return self._storage

    @storage.setter
    def storage(self, storage: LayerStorage[AnySegment]) -> None:
        self._storage = storage

    def _sync_lengths(self) -> None:
        """Count the tokens that replayed graphs have stored. The host waits for the device."""
        if not self._host_is_behind:
            return
        assert self._device_plan is not None
        self._host_is_behind = False
        counts = self._device_plan.counts()
        num_pushed = counts.total - self._num_tokens
        before = count_tokens(self._storage, self._num_tokens)
        num_packed = counts.open + counts.recent - before.open - before.recent
        self._set_counts(counts)
        self._num_tokens = counts.total
        self._num_new = 1
        self._counters["tokens_compressed"] += num_packed
        self._counters["chunks_compressed"] += num_packed // self._num_packed_at_once
        self._counters["attend_calls"] += num_pushed
        self._counters["fused_calls"] += num_pushed
        self._check_packed()

    @property
    def _num_packed_at_once(self) -> int:
        """Tokens that are packed together."""
        return self.policy.residual_length - self.policy.num_kept

    def _num_added(self, num_recent: int) -> int:
        """Count the tokens that the open segment gets when the device packs a full tail behind `num_recent` rows."""
        return self._num_packed_at_once

    def _set_counts(self, counts: StepCounts) -> None:
        opened, recent = split_open(self._storage)
        opened.length = counts.open
        if recent is not None:
            recent.length = counts.recent
            recent.start = opened.stop
        assert self._storage.tail is not None
        self._storage.tail.length = counts.tail

    def _count_push(self) -> None:
        """Count a token that the device stores, as the kernel does; `_length` does not count it yet."""
        counts = count_tokens(self._storage, self._num_tokens)
        num_open, num_recent = counts.open, counts.recent
        num_tail = counts.tail
        if num_tail == self.policy.residual_length:
            num_tail = self.policy.num_kept
            num_added = self._num_added(num_recent)
            num_open += num_added
            num_recent += self._num_packed_at_once - num_added
            self._counters["tokens_compressed"] += self._num_packed_at_once
            self._counters["chunks_compressed"] += 1
        self._set_counts(StepCounts(num_open, num_recent, num_tail + 1, counts.total))
        self._num_new = 1

    def _check_packed(self) -> None:
        """Check packed tokens now and then: a `ValueError` if one overflowed."""
        opened, recent = split_open(self._storage)
        total = opened.length if recent is None else recent.stop - opened.start
        if total < self._num_checked + _CHECK_STEP:
            return
        first = min(self._num_checked, opened.length)
        self._num_checked = total
        held = [(opened, first)] if recent is None else [(opened, first), (recent, 0)]
        for segment, start in held:
            self._check_segment(segment, start)

    @abstractmethod
    def _check_segment(self, segment: AnySegment, first: int) -> None:
        """Raise a `ValueError` if a token of a segment from the `first` on could not be coded."""

    # Capacity and plans

    def _can_push(self) -> bool:
        """Return True if a decoded token changes nothing but open segment, recent rows and tail."""
        if self.phase is not Phase.STORED or self.codec is None or self._records_queries:
            return False
        if not self.policy.residual_length or self.storage.tail_length > self.policy.residual_length:
            return False
        first = next((segment for segment in self.storage.segments if segment.length), None)
        # Padding is of the first prompt, and hidden by masks of its own part
        return first is not None and self._left_padding.ends()[1] <= first.stop

    @without_caller_contexts
    def _prepare_steps(self) -> None:
        """Reserve capacity for decoded tokens, and plan their steps."""
        if not self._is_static or not self._can_push():
            return
        opened = self._reserve_open()
        plan = None
        if choose_token_kernel(next(iter(opened.sides()[0].values())))[0] == "triton":
            self._reserve_recent()
            self._reserve_tail()
            plan = self._plan_on_device()
        if self.max_length is not None:
            self._make_graph(plan)

    @abstractmethod
    def _reserve_open(self) -> AnySegment:
        """Return the segment of packed tokens that grows, with capacity for more, in front of recent rows."""

    def _reserve_recent(self) -> None:
        """Give recent rows all the capacity that they need, where the last plan had them."""

    def _capacity_for(self, opened: AnySegment, num_added: int) -> int:
        """Return the tokens that the open segment should have capacity for; each step adds up to `num_added`."""
        least = opened.length + num_added
        wanted = 0 if self.max_length is None else self.max_length - opened.start
        if wanted >= least:
            return wanted
        has_room = opened.capacity * opened.chunk_length >= least
        return least if has_room else least + max(opened.length // _SHARE, _LEAST)

    def _reserve_tail(self) -> None:
        """Give the tail all the capacity that it needs, where the last plan had it."""
        storage, limit = self.storage, self.policy.residual_length
        if storage.tail is None:
            keys, values = (
                torch.zeros(self.batch_size, shape[1], 0, shape[3], dtype=self.dtype, device=self.device)
                for shape in (self._shapes["keys"], self._shapes["values"])
            )
            storage.tail = ExactTail(keys, values, limit)
        if self._device_plan is None:
            storage.tail.reserve(limit)
        else:
            storage.tail.move_to(*self._device_plan.tail_storage)

    @abstractmethod
    def _make_plan(self, parts: Sequence[LayerPart]) -> DevicePlan[AnySegment]:
        """Plan steps on a GPU over prefix and segments in use, `parts`, and a tail."""

    def _plan_on_device(self) -> DevicePlan[AnySegment]:
        """Return the plan of the next step: the last one if addresses are the same."""
        storage, codec = self.storage, self.codec
        plan = self._device_plan
        assert codec is not None
        if plan is None or plan.addresses != list_addresses(storage, codec, self.padding):
            plan = self._make_plan(list(self.packed_parts(None)))
        else:
            plan.version = storage.version
            plan.set_counts(count_tokens(storage, self._length))
        self.plan = self._device_plan = plan
        return plan

    def _make_graph(self, plan: DevicePlan[AnySegment] | None) -> None:
        assert self.max_length is not None
        graph = self._graph
        num_columns = self.max_length if graph is None else graph.num_columns
        if self._length >= num_columns:
            num_columns = self._length + max(self._length // _SHARE, _LEAST)
        if graph is None or graph.plan is not plan or graph.num_columns != num_columns:
            graph = GraphState(self, plan, num_columns)
        if plan is None:
            graph.total.fill_(self._length)
        self.graph = self._graph = graph

    @property
    def _pushes_on_device(self) -> bool:
        """True if the plan stores the next token."""
        plan = self.plan
        return isinstance(plan, DevicePlan) and plan.version == self.storage.version

    def invalidate_plan(self) -> None:
        """See `CompressedLayer.invalidate_plan`: graphs cannot take the next token either."""
        super().invalidate_plan()
        self.graph = None

    # Updates and attention

    @without_caller_contexts
    def commit_prompt(self) -> None:
        """See `LazyLayer.commit_prompt`; steps are prepared before the first token is decoded."""
        is_committed = self._uncommitted_prompt is None
        super().commit_prompt()
        if not is_committed:
            self._prepare_steps()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = super().update(key_states, value_states)
        graph = self.graph
        if graph is not None:
            if self._num_tokens >= graph.num_columns:
                self._prepare_steps()
            elif graph.plan is None:
                graph.total.fill_(self._num_tokens)
        return states

    def _pack_by_plan(self, plan: StepPlan) -> bool:
        """See `CompressedLayer._pack_by_plan`. On a GPU the push packs: here only its capacity is checked."""
        if not isinstance(plan, DevicePlan):
            return super()._pack_by_plan(plan)
        self._check_packed()
        if self._records_queries:
            return False
        # The device packs; tokens that it adds need capacity
        opened, recent = split_open(self._storage)
        num_added = self._num_added(0 if recent is None else recent.length)
        return opened.length + num_added <= opened.capacity * opened.chunk_length

    def _before_update(self) -> None:
        if self._records_queries:
            # The codec is fitted again soon, by the host
            self.invalidate_plan()
        if not self._pushes_on_device:
            super()._before_update()

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self._pushes_on_device:
            super()._append(keys, values)
            return
        if keys.shape[2] != 1:
            self.invalidate_plan()
            super()._before_update()
            super()._append(keys, values)
            return
        plan, tail = self.plan, self.storage.tail
        assert plan is not None and tail is not None
        if tail.length >= plan.limit and not self._pack_by_plan(plan):
            self._prepare_steps()
            assert self.plan is not None
            plan = self.plan
        plan.push(tail, keys, values)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `LazyLayer.attend`; after a single token the steps of later ones are prepared."""
        output = super().attend(call)
        if self._num_new == 1 and self.graph is None and not self._pushes_on_device:
            self._prepare_steps()
        return output

    @without_caller_contexts
    def crop_tokens(self, count: int) -> None:
        with self._all_or_nothing():
            super().crop_tokens(count)
            self._num_checked = max(self._num_checked - count, 0)
            self._prepare_steps()

    def share(self) -> Iterator[torch.Tensor]:
        # Its storage may be shared
        self._drop_device_plan()
        yield from super().share()

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._drop_device_plan()
        super()._map_stored(function)

    def _drop_device_plan(self) -> None:
        """Drop the newest plan, after its counters were read."""
        self._sync_lengths()
        self._device_plan = None

    def get_seq_length(self) -> Any:
        """See `LazyLayer.get_seq_length`; in a graph on the device, as Transformers' own static layers have it."""
        if torch.compiler.is_dynamo_compiling() and self.graph is not None:
            return self.graph.total
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `LazyLayer.get_mask_sizes`: of one token the same in every step, if steps are to be compiled."""
        if self.graph is not None and query_length == 1:
            return self.graph.num_columns, 0
        return super().get_mask_sizes(query_length)

    def __deepcopy__(self, memo: dict[int, object]) -> "Self":
        self._sync_lengths()
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, object]:
        self._sync_lengths()
        return self.__dict__


class GraphStates(torch.Tensor):
    """
    Stands for the states that `update` returns while a step is traced: new keys or values `[B, H, 1, D]`, and `order`
    and `number` of the layer's graph state. A tensor, as models repeat heads on the way; nothing else can be done with
    it.
    """

    states: torch.Tensor
    order: torch.Tensor
    number: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        # Dynamo asks for the base of stand-ins that reach it behind a graph break
        if not isinstance(result, torch.Tensor) or func == torch.Tensor._base.__get__:  # type: ignore[union-attr]
            return result
        if func not in _REPEATING:
            raise NotImplementedError(
                "steps with `max_cache_len` are compiled for models whose attention is `sdpa`: this one computes with "
                "what the cache returned"
            )
        return _stand_for(args[0].states, args[0].order, args[0].number, result)


_REPEATING = (torch.Tensor.__getitem__, torch.Tensor.expand, torch.Tensor.reshape)


def traced_states(
    layer: StaticLayer[Any, Any], keys: torch.Tensor, values: torch.Tensor
) -> tuple[GraphStates, GraphStates]:
    """Return stand-ins for all states of a static layer that is updated by a token, while it is traced."""
    graph = layer.graph
    assert graph is not None
    layer._host_is_behind = graph.plan is not None
    return _stand_for(keys, graph.order, graph.number, keys), _stand_for(values, graph.order, graph.number, values)


def _stand_for(new: torch.Tensor, order: torch.Tensor, number: int, shown: torch.Tensor) -> GraphStates:
    """Return a stand-in for all states of a layer that looks like `shown` and carries `new` states."""
    states = shown.as_subclass(GraphStates)
    states.states, states.order, states.number = new, order, number
    return states


def _attend(
    query: torch.Tensor,
    key: GraphStates,
    value: GraphStates,
    attn_mask: torch.Tensor | None = None,
    *_: object,
    scale: float | None = None,
    **__: object,
) -> torch.Tensor:
    return static_attention(query, key.states, value.states, attn_mask, key.order, key.number, scale)


@torch.library.custom_op("kvcache_plugins::static_attention", mutates_args=("order",))
def static_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    order: torch.Tensor,
    number: int,
    scale: float | None,
) -> torch.Tensor:
    """
    Store a token, keys and values `[B, H, 1, D]`, in the static layer whose graph state has `order` and `number`, and
    attend to all that it holds with queries `[B, H * G, 1, D]`.
    """
    graph = _GRAPH_STATES.get(number)
    layer = None if graph is None else graph.layer()
    if graph is None or layer is None:
        raise RuntimeError("the cache of this graph is gone, or its storage has been moved")
    # Operators are called with lazy states switched off
    with torch.no_grad(), torch._C._EnableTorchFunction():
        if graph.plan is not None:
            graph.plan.push_uncounted(keys, values)
            layer._host_is_behind = True
            return attend(query, graph.plan.parts(mask), keys.shape[1], scale, "triton").contiguous()
        layer.update(keys, values)
        return layer.attend(AttentionCall(query, mask, scale=scale)).contiguous()


@static_attention.register_fake
def _fake(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], values.shape[3])
