"""Static layers: fixed addresses while decoding, so that eager steps, `torch.compile` and CUDA graphs share one path.

    [ prefix ] [ segments ] [ open segment: rows, with capacity for more ] [ tail: the newest tokens, always as many ]

Every step encodes the token that leaves the tail to the end of the open segment, shifts the tail by the new token, and
attends. The device counts the rows in use and the position of the next token (`StaticStepState`). The host counts too
where it runs the steps itself; after replayed graphs it asks the device when a length is needed
(`StaticLayer._sync_lengths`). To everything else a static layer is an ordinary layer at any time.

In a graph of `torch.compile` a step of a layer is one operator, `torch.ops.kvcache_plugins.static_attention`. `update`
is called before the query is known, so it returns `GraphStates`, which become the operator where attention gets them.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.formats.parts import DensePart, Part
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_token_kernel, compiles_kernels, explain_kernel, load_triton
from kvcache_plugins.kernels.masks import combine_masks, mask_columns, slice_mask

from .finite_check import check_finite
from .layer_state import LayerState
from .lazy_kv import make_lazy_kv
from .lazy_layer import tensor_signature
from .phase import Phase
from .policies import RowPolicy
from .row_layer import RowLayer
from .segments import RowSegment
from .step_plan import DroppedOnCopy
from .storage import LayerStorage
from .torch_contexts import without_caller_contexts


# Capacity that is added when there is none left: a share of the rows held, and at least so many
_SHARE, _LEAST = 8, 64
# Newest tokens that are exact where others would be rows of more bits
_NUM_EXACT = 20
# Tokens after which the host asks whether all of them could be coded
_CHECK_STEP = 64
# An operator is given tensors and numbers: forms by a number, as long as they are in use
_FORMS: "WeakValueDictionary[int, StaticStepState]" = WeakValueDictionary()
_NUMBERS = itertools.count(1)


class StaticStepState(DroppedOnCopy):
    """
    Device-side counters and fixed addresses of the decode steps of a layer whose tail is full and whose last segment
    is open.

    Attributes:
        number (`int`): identifies the state to the operator.
        storage (two `torch.Tensor` of shape `[B, H, exact tokens, D]`): keys and values of the tail.
        order (`torch.Tensor`): dummy that the operator writes to, so that calls keep their order.
        total (`torch.Tensor` of shape `[]`): tokens of the sequence.
        num_columns (`int`): capacity in tokens.
    """

    def __init__(self, layer: "StaticLayer"):
        self.layer = ref(layer)
        self.number = next(_NUMBERS)
        assert layer.codec is not None
        self._codec = layer.codec
        _FORMS[self.number] = self
        self._block = layer.storage.segments[-1]
        self.storage = layer._buffer_storage()
        self._plan_inputs = layer._plan_inputs()
        self._num_exact = self.storage[0].shape[2]
        self._last = self._block.start + self._block.capacity
        self.num_columns = self._last + self._num_exact
        offsets = torch.zeros(layer.batch_size, dtype=torch.int64, device=layer.device)
        self._offsets = None if layer.padding is None else offsets + layer.padding
        # For every program that counts them on: rows stored and tokens of the sequence
        self._numbers = offsets.new_zeros(2, *self.storage[0].shape[:2], 2)
        self._stored, self.total = self._numbers[0, 0, 0, :1], self._numbers[0, 0, 0, 1]
        self.order = offsets.new_zeros(1)
        torch._dynamo.mark_static_address(self.order)
        self._newest = torch.arange(-self._num_exact, 0, dtype=torch.int64, device=layer.device)
        # Parts before the buffer with all their capacity, and the positions of their tokens or that of the first
        block, prefix, parts = self._block, layer.storage.prefix, list[Any](layer.packed_parts(None))
        opened = parts.pop() if block.length else layer._part(block, None)
        parts.append(replace(opened, length=block.capacity, num_tokens=self._stored))
        parts = [replace(part, mask=slice_mask(part.mask, 0, part.length)) for part in parts]
        starts: list[Any] = [each.start for each in layer.storage.segments if each.length or each is block]
        in_front = [] if prefix is None or not prefix.num_slots else [prefix.positions]
        self._parts = list(zip(parts, [*in_front, *starts], strict=True))
        self._steps: dict[tuple[object, ...], Callable[[torch.Tensor], torch.Tensor] | None] = {}
        self.set_numbers(layer)
        self._pushing = self._keep_push()

    def holds(self, layer: "StaticLayer") -> bool:
        before, now = self._plan_inputs, layer._plan_inputs()
        return len(before) == len(now) and all(mine is theirs for mine, theirs in zip(before, now, strict=True))

    def set_numbers(self, layer: "StaticLayer") -> None:
        stored, total = self._block.length, layer.exact_start + self._num_exact
        self._numbers.copy_(torch.tensor([stored, total], dtype=torch.int64, device="cpu"))

    @without_caller_contexts
    def _keep_push(self) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """Compile the push launch now: memory allocated during graph capture would belong to the graph."""
        if choose_token_kernel(self.storage[0])[0] != "triton":
            return None
        formats, positions = self._codec.formats(self.storage[0].device), Positions(self._block.start, self._offsets)
        rows = self._block.keys, self._block.values
        push: Callable[[torch.Tensor, torch.Tensor], None] | None
        push = load_triton().keep_push(self.storage, rows, self._numbers, formats, positions)
        return push

    def push(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Push a token `[B, H, 1, D]` into the tail, and encode the oldest one."""
        if self._pushing is None:
            self._pushing = self._keep_push()
        (self._pushing or self._push_by_pytorch)(keys, values)

    @without_caller_contexts
    def _push_by_pytorch(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        # The position behind all rows, less padding that leaves the one of this token
        padding = self._last - self._block.start - self._stored.expand(len(keys))
        positions = Positions(self._last, padding if self._offsets is None else padding + self._offsets)
        oldest_keys, oldest_values = (states[:, :, :1] for states in self.storage)
        rows = self._codec.encode(oldest_keys, oldest_values, positions)
        for stored, row in zip((self._block.keys, self._block.values), rows, strict=True):
            stored.index_copy_(2, self._stored, row)
        for states, new in zip(self.storage, (keys, values), strict=True):
            states.copy_(torch.cat((states[:, :, 1:], new.to(states.dtype)), dim=2))
        self._numbers.add_(1)

    def parts(self, mask: torch.Tensor | None) -> list[Part]:
        """Lists everything held, with its columns of a mask over all positions; nothing is read from the device."""
        parts: list[Any] = []
        for part, where in self._parts:
            if mask is not None and isinstance(where, torch.Tensor):
                columns = mask_columns(mask, where, len(where), mask.shape[-1])
            else:
                columns = None if isinstance(where, torch.Tensor) else slice_mask(mask, where, where + part.length)
            if part.mask is not None:
                columns = combine_masks(columns, part.mask[:, 0, 0])
            parts.append(replace(part, mask=columns))
        if mask is not None:
            mask = slice_mask(mask, 0, self.num_columns)
            assert mask is not None
            mask = mask.index_select(3, self.total + self._newest)
        return [*parts, DensePart(*self.storage, self._num_exact, mask)]

    def kept_step(self, query: torch.Tensor, num_heads: int, scale: float | None) -> Any:
        """Finds or prepares attention of queries like `query`, with nothing hidden, by kernels of a GPU, or `None`."""
        kind = query.shape, query.dtype, scale
        if kind not in self._steps:
            self._steps[kind] = load_triton().keep_attention(query, self.parts(None), num_heads, scale)
        return self._steps[kind]


class StaticLayer(RowLayer):
    """
    A layer of rows that stands still while tokens are decoded one by one, with as many of the newest tokens exact.

    Args:
        policy, layer_idx, attention_mask: see `RowLayer`.
        max_length (`int`, *optional*): tokens that there is capacity for from the first one on. By default capacity
            grows with them, and only where kernels of a GPU compute the layer stands still.
    Attributes:
        form (`StaticStepState`, *optional*): where it stands, if the next token can be taken in there.
    """

    form: StaticStepState | None = None
    _form: StaticStepState | None = None
    _num_tokens = 0
    _host_is_behind = False

    def __init__(
        self,
        policy: RowPolicy,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
    ):
        super().__init__(policy, layer_idx, attention_mask)
        self.max_length, self.is_compileable = max_length, max_length is not None

    def _clear(self) -> None:
        self.form = self._form = None
        super()._clear()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._look_for_kernels()

    def restore(self, state: LayerState, device: torch.device, path: str = "state") -> None:
        super().restore(state, device, path)
        self._look_for_kernels()

    def _look_for_kernels(self) -> None:
        has_kernels, reason = compiles_kernels(torch.empty(0, dtype=torch.float32, device=self.device)), None
        if has_kernels:
            triton = load_triton()
            if not triton.has_room(self._unfitted.shared_formats, self.device, self.dtype):
                has_kernels, reason = False, triton.TOO_LARGE
        elif self.device.type == "cuda":
            reason = explain_kernel("cuda")[1] or "not chosen"
        if self.max_length is not None and reason is not None:
            raise ValueError(f"`max_cache_len` needs Triton's kernels: {reason}")
        self._is_static = has_kernels or self.max_length is not None
        if self._is_static and not self.policy.keeps_whole_tail:
            # In the place of rows of more bits, which are coded twice
            num_exact = self.policy.residual_length
            if self.policy.recent_length:
                self._requantize_recent()
                num_exact = max(num_exact, _NUM_EXACT)
            self.policy = replace(self.policy, recent_length=0, residual_length=num_exact, keeps_whole_tail=True)

    # Tokens of the sequence and of the blocks, which a replayed graph adds to

    @property
    def _length(self) -> int:  # type: ignore[override]
        self._sync_lengths()
        return self._num_tokens

    @_length.setter
    def _length(self, length: int) -> None:
        self._num_tokens, self._host_is_behind = length, False

    @property
    def storage(self) -> LayerStorage[RowSegment]:  # type: ignore[override]
        self._sync_lengths()
        return self._storage

    @storage.setter
    def storage(self, storage: LayerStorage[RowSegment]) -> None:
        self._storage = storage

    def _sync_lengths(self) -> None:
        """Count the tokens that replayed graphs have stored. The host waits for the device."""
        if not self._host_is_behind:
            return
        assert self._form is not None
        self._host_is_behind = False
        count = int(self._form.total) - self._num_tokens
        self._note_pushed(count)
        self._num_tokens += count
        for name in ("attend_calls", "fused_calls"):
            self._counters[name] += count

    def _note_pushed(self, count: int) -> None:
        """Count encoded tokens, and check them now and then: a `ValueError` if one overflowed."""
        block, before = self._storage.segments[-1], self._storage.segments[-1].length
        block.length, self._num_new, self.plan = before + count, 1, None
        for name in ("tokens_compressed", "chunks_compressed"):
            self._counters[name] += count
        first = before // _CHECK_STEP * _CHECK_STEP
        if block.length >= first + _CHECK_STEP:
            rows = slice(first, block.length)
            assert self.codec is not None
            overflow = self.codec.overflow(block.keys[:, :, rows], block.values[:, :, rows])
            assert overflow is not None
            nothing = self._buffer_storage()[0][:, :, :0]
            check_finite(nothing, nothing, None, self.layer_idx, overflow=overflow.any())

    def _buffer_storage(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._storage.tail is not None
        return self._storage.tail.tensors()

    def _plan_inputs(self) -> list[object]:
        """List the objects whose identity the step state depends on."""
        own = self.storage.prefix
        prefix = () if own is None else (own.keys, own.count)
        blocks = (each for block in self.storage.segments for each in (block, block.keys))
        return [self.padding, self.codec, *blocks, *prefix, *self._buffer_storage()]

    def _enter_static(self) -> None:
        """Make the layer static if the next token changes nothing but the tail and the open segment."""
        storage, limit, self.form = self.storage, self.policy.residual_length, None
        buffer = storage.tail
        if not self._is_static or self.phase is not Phase.STORED or buffer is None or buffer.length != limit:
            return
        if self._records_queries or not isinstance(self.codec, RowCodec):
            return
        first = next((block for block in storage.segments if block.length), None)
        # Padding is of the first prompt, and hidden by masks of its own part
        if first is None or (self.padding is not None and int(self.padding.max()) > first.start + first.length):
            return
        if not storage.segments[-1].is_open:
            keys, values = (
                torch.zeros(self.batch_size, self._shapes["keys"][1], 0, size, dtype=torch.uint8, device=self.device)
                for size in self.codec.row_sizes
            )
            storage.segments.append(RowSegment(keys, values, self.exact_start, 0))
        newest = storage.segments[-1]
        wanted = 0 if self.max_length is None else self.max_length - newest.start - limit
        if newest.capacity < max(wanted, newest.length + 1):
            more = newest.length + max(newest.length // _SHARE, _LEAST)
            newest.resize(wanted if wanted > newest.length else more)
        form, states = self._form, [each[:, :, :limit] for each in buffer.tensors()]
        if form is not None and tensor_signature(*states) == tensor_signature(*form.storage):
            # An update of several tokens has moved them
            buffer.move_to(*form.storage)
        elif buffer.capacity != limit:
            buffer.move_to(*(each.clone() for each in states))
        if self._form is None or not self._form.holds(self):
            self._form = StaticStepState(self)
        else:
            self._form.set_numbers(self)
        self.form = self._form

    @without_caller_contexts
    def commit_prompt(self) -> None:
        """See `LazyLayer.commit_prompt`; the layer becomes static before the first token is decoded."""
        is_settled = self._pending is None
        super().commit_prompt()
        if not is_settled:
            self._enter_static()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_alike = self._last_signature == tensor_signature(key_states, value_states) and not torch.is_grad_enabled()
        if self.form is None or not is_alike or self._pending is not None:
            return super().update(key_states, value_states)
        self._push(key_states, value_states)
        self._length += 1
        return make_lazy_kv(self, key_states.shape, value_states.shape, self._length, self.dtype, self.device)

    def _push(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        newest = self.storage.segments[-1]
        if newest.length == newest.capacity:
            self._enter_static()
        assert self.form is not None
        self.form.push(keys, values)
        self._note_pushed(1)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[2] == 1 and self.form is None:
            self._enter_static()
        if keys.shape[2] == 1 and self.form is not None:
            self._push(keys, values)
            return
        self.invalidate_plan()
        super()._append(keys, values)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `LazyLayer.attend`; a layer whose tail is full again becomes static before the next token."""
        output = super().attend(call)
        if self.form is None:
            self._enter_static()
        return output

    def run_plan(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        """See `LazyLayer.run_plan`: on a GPU by launches that are kept."""
        form = self.form
        if form is None or query.shape[2] != 1 or choose_token_kernel(query)[0] != "triton":
            output = super().run_plan(query, num_tokens, scale)
            if form is None and output is not None:
                self._enter_static()
            return output
        if num_tokens != self._length:
            return None
        step = form.kept_step(query, self._shapes["keys"][1], scale)
        if step is None:
            return None
        output = step(query)
        self._counters["attend_calls"] += 1
        self._counters["fused_calls"] += 1
        return output

    def get_seq_length(self) -> Any:
        """See `LazyLayer.get_seq_length`; in a graph on the device, as Transformers' own static layers have it."""
        if torch.compiler.is_dynamo_compiling() and self.form is not None:
            return self.form.total
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `LazyLayer.get_mask_sizes`: of one token the same in every step, if steps are to be compiled."""
        if self.form is not None and self.is_compileable and query_length == 1:
            return self.form.num_columns, 0
        return super().get_mask_sizes(query_length)

    def invalidate_plan(self) -> None:
        """See `CompressedLayer.invalidate_plan`: also leave the static state."""
        super().invalidate_plan()
        self.form = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._sync_lengths()
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        self._sync_lengths()
        return self.__dict__


class GraphStates(torch.Tensor):
    """
    Stands for the states that `update` returns while a step is traced: new keys or values `[B, H, 1, D]`, and `order`
    and `number` of the layer's form. A tensor, as models repeat heads on the way; nothing else can be done with it.
    """

    states: torch.Tensor
    order: torch.Tensor
    number: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return result
        if func not in _REPEATING:
            raise NotImplementedError(
                "steps with `max_cache_len` are compiled for models whose attention is `sdpa`: this one computes with "
                "what the cache returned"
            )
        return _stand_for(args[0].states, args[0].order, args[0].number, result)


_REPEATING = (torch.Tensor.__getitem__, torch.Tensor.expand, torch.Tensor.reshape)


def traced_states(layer: StaticLayer, keys: torch.Tensor, values: torch.Tensor) -> tuple[GraphStates, GraphStates]:
    """Stand for the update of a static layer by a token, while it is traced."""
    form = layer.form
    assert form is not None
    layer._host_is_behind = True
    return _stand_for(keys, form.order, form.number, keys), _stand_for(values, form.order, form.number, values)


def _stand_for(new: torch.Tensor, order: torch.Tensor, number: int, shown: torch.Tensor) -> GraphStates:
    """Returns new states in the place of all of a layer's, which look like `shown`."""
    states = shown.as_subclass(GraphStates)
    states.states, states.order, states.number = new, order, number
    return states


def _attend(
    query: torch.Tensor,
    key: GraphStates,
    value: GraphStates,
    attn_mask: Any = None,
    *_: Any,
    scale: Any = None,
    **__: Any,
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
    Stores a token, keys and values `[B, H, 1, D]`, in a layer that stands still, whose form's `order` and `number` are
    given, and attends to all that it holds with queries `[B, H * G, 1, D]`.
    """
    form = _FORMS.get(number)
    layer = None if form is None else form.layer()
    if form is None or layer is None:
        raise RuntimeError("the cache of this graph is gone, or its storage has been moved")
    # Operators are called with lazy states switched off
    with torch.no_grad(), torch._C._EnableTorchFunction():
        form.push(keys, values)
        if choose_token_kernel(query)[0] == "triton":
            layer._host_is_behind = True
            return attend(query, form.parts(mask), keys.shape[1], scale, "triton").contiguous()
        layer._note_pushed(1)
        layer._length = layer._num_tokens + 1
        return layer.attend(AttentionCall(query, mask, scale=scale)).contiguous()


@static_attention.register_fake
def _fake(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], values.shape[3])
