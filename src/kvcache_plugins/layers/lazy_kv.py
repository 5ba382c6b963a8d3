"""The seam between caches and attention: states that stay lazy until attention asks for them.

`Cache.update` gets no query and the attention function gets no cache, so a compressed cache would have to hand back
dense tensors, or patch models. `LazyKV` is the third way: a tensor that reports the dense shape, dtype and device
but only refers to its layer. Given to `torch.nn.functional.scaled_dot_product_attention`, or to a function of
`attention_functions`, it has the layer attend: nothing is made dense. Attention that is written out in steps, such as
`eager`, is the layer's too: a product of queries and keys gives `LazyScores`, which follow the steps (`scores.py`) up
to the product with the values. Weights become dense when somebody looks at them, or when the layer changes meanwhile.

What models do to states before that is recorded where it leaves every token by itself. Shapes tell: done to states
without data, of a number of tokens that is no other size, it gives a tensor with as many in one dimension. Heads that
are repeated are still attended to as they are stored, and of what is projected, as in latent attention, a tile of
tokens is made at a time, so that nothing has to be whole. Anything else, such as a step that is no attention's, gets
the dense tensor: right, and slower.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, getitem
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.nn.functional as F

from kvcache_plugins.kernels.attention_call import AttentionCall

from .scores import Scores, follow, functions
from .torch_contexts import in_caller_context, without_caller_contexts, without_gradients


_Lazy = TypeVar("_Lazy", bound="LazyKV")

# In the place of a number of tokens among recorded arguments
TOKENS = object()
# Tokens of states without data: primes that are no other size of a model
_COUNTS = 10_007, 1_000_003, 100_000_007
_REPEAT_INDEX = (slice(None), slice(None), None, slice(None), slice(None))
_OPERATION, _EXACT, _SCORES = attrgetter("operation"), attrgetter("exact"), attrgetter("scores")
_DENSE_GETTERS = {"T", "H", "mT", "mH", "real", "imag", "data", "grad"}


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """
    A function and its arguments, of which some are results of others, and `effects`: operations that write into its
    result afterwards. The two without a function are what is stored.
    """

    function: Callable[..., Any] | None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    effects: list["Operation"] = field(default_factory=list)

    def compute(self, done: dict["Operation", Any], num_tokens: int) -> Any:
        """
        Do the operation, and all that it is made of, to a tile of so many tokens, and keep results in `done`, which
        has what `STORED_KEYS` and `STORED_VALUES` are, `[B, H, tokens, D]`.
        """
        if self not in done:

            def fill(value: Any) -> Any:
                if isinstance(value, Operation):
                    return value.compute(done, num_tokens)
                return num_tokens if value is TOKENS else value

            assert self.function is not None
            args, kwargs = map_nested(fill, self.args), map_nested(fill, self.kwargs)
            done[self] = self.function(*args, **kwargs)
            for effect in self.effects:
                effect.compute(done, num_tokens)
        return done[self]

    def sides(self) -> set[str]:
        """Name what it is made of: `"keys"`, `"values"` or both."""
        found, waiting = set[Operation](), [self]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                map_nested(lambda value: waiting.append(value) if isinstance(value, Operation) else None, each.args)
                waiting.extend(each.effects)
        return {side for side, stored in STORED.items() if stored in found}


STORED_KEYS, STORED_VALUES = Operation(None), Operation(None)
STORED = {"keys": STORED_KEYS, "values": STORED_VALUES}


def count_for(num_tokens: int) -> int:
    """Tell how many tokens samples have in the place of so many: more, so that a slice of these is one of them too."""
    return next(count for count in _COUNTS if count > num_tokens)


def find_tokens(function: Callable[..., Any], states: Any, made: torch.Tensor) -> int | None:
    """
    Find the dimension of a result, computed without data, that tokens are in, in order; `None` if there is none, or
    more than one. `states` are the first lazy ones among the arguments.
    """
    count = count_for(states.num_tokens)
    dims = [dim for dim, size in enumerate(made.shape) if size and size % count == 0]
    if len(dims) != 1 or made.shape[dims[0]] != count:
        return None
    if function in _RESHAPING and math.prod(made.shape[: dims[0]]) != math.prod(states.shape[: states.token_dim]):
        return None
    return dims[0]


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to what tuples, lists and dictionaries hold."""
    if isinstance(value, tuple | list):
        made = [map_nested(function, each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {name: map_nested(function, each) for name, each in value.items()}
    return function(value)


def mark_tokens(function: Callable[..., Any], states: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Put `TOKENS` in the place of the tokens' number among sizes, where it stands for those of lazy `states`."""
    if function not in _SIZED or args[0] is not states:
        return args
    sizes = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else list(args[1:])
    before = math.prod(states.shape[: states.token_dim])
    if function in _RESHAPING and -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(states.shape) // max(-math.prod(sizes), 1)
    for place, size in enumerate(sizes):
        if size != states.num_tokens:
            continue
        if function in _RESHAPING:
            is_tokens = math.prod(sizes[:place]) == before
        else:
            is_tokens = place == states.token_dim + (len(sizes) - len(states.shape)) * (function not in _EMPTY)
        if is_tokens:
            sizes[place] = TOKENS
            break
    return args[0], tuple(sizes)


def write(base: Operation, operation: Operation) -> bool:
    """Record a copy into a part of an empty tensor; tell whether it is one, as what is stored cannot be written to."""
    while base.function is not None and base.function not in _EMPTY:
        base = base.args[0]
    if base.function is None:
        return False
    base.effects.append(operation)
    return True


_RESHAPING = functions("view", "reshape", "flatten", "unflatten")
_EMPTY = functions("new_empty")
_SIZED = functions("view", "reshape", "expand", "new_empty")
RECORDABLE = (
    _RESHAPING
    | _SIZED
    | functions("transpose", "permute", "unsqueeze", "squeeze", "repeat", "repeat_interleave", "__getitem__")
    | functions("split", "chunk", "cat", "contiguous", "detach", "to", "float", "copy_")
    | functions("linear", "mul", "__mul__", "__rmul__", "div", "__truediv__")
)
_TRANSPOSE, _MATMUL, _MAX = functions("transpose"), functions("matmul"), functions("max")
_METADATA_FUNCTIONS = functions("size", "dim", "numel", "__len__", "element_size", "is_floating_point", "__hash__")


class DenseSides(dict[str, torch.Tensor]):
    """Dense keys and values that lazy states are of, made before their layer changes these; empty until then."""

    __slots__ = ("__weakref__",)


class HandedOut(ref[DenseSides]):
    """Refers to what the lazy states of a layer share as long as any is held; a copy of the layer has none."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class LazyKV(torch.Tensor):
    """
    Keys or values of a layer, `[batch_size, num_heads, seq_len, head_dim]`, or what has been made of them, that become
    dense only when something needs them to.

    Attributes:
        layer: the `LazyLayer` that they belong to, or one that answers attention as it does.
        operation (`Operation`): what they are of what the layer stores.
        token_dim (`int`): the dimension that tokens are in.
        exact (`torch.Tensor`, *optional*): the dense states, where the layer has them at hand (a prompt before its
            compression).
        dense (`DenseSides`, *optional*): what the layer stored, once it stores something else.
        num_repeats (`int`): how many query heads each head has been expanded to; 0 if these are no longer what the
            layer's `attend` is over.
        transposed (`LazyKV`, *optional*): of keys `[batch_size, num_heads, head_dim, seq_len]`, those that they
            were before their last two dimensions were exchanged.
    """

    layer: Any
    operation: Operation
    token_dim: int = 2
    exact: torch.Tensor | None = None
    dense: DenseSides | None = None
    num_repeats: int = 1
    transposed: "LazyKV | None" = None
    _size: torch.Size
    _sample: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Tells the size as any tensor does; models ask several times a layer, and `torch.compile` traces this."""
        return self._size

    @property
    def num_tokens(self) -> int:
        return self._size[self.token_dim]

    def sample(self) -> torch.Tensor:
        """Make what operations are recorded on: the same without data, and of another number of tokens."""
        if self._sample is None:
            count = count_for(self.num_tokens)
            stored: dict[Operation, torch.Tensor] = {}
            for side, operation in STORED.items():
                batch_size, num_heads, _, head_dim = self.layer.states_shape(side)
                shape = batch_size, num_heads, count, head_dim
                stored[operation] = torch.empty(shape, dtype=self.layer.dtype, device="meta")
            made: torch.Tensor = self.operation.compute(stored, count)
            self._sample = made
        return self._sample

    def densify(self) -> torch.Tensor:
        """The dense states, in the shape reported."""
        if self.exact is not None:
            return self.exact
        tile: dict[Operation, torch.Tensor] = {}
        for side in sorted(self.operation.sides()):
            stored = self.dense[side] if self.dense else self.layer.materialize(side)
            if stored.shape[2] < self.num_tokens:
                raise RuntimeError("these lazy states are older than the last `crop` or `reset` of their cache")
            tile[STORED[side]] = stored[:, :, : self.num_tokens]
        dense: torch.Tensor = self.operation.compute(tile, self.num_tokens)
        return without_gradients(dense) if self.layer.has_gradients and torch.is_grad_enabled() else dense

    def read(self) -> torch.Tensor:
        """Make the states dense for what is no attention, and have the layer count it."""
        dense = self.densify()
        for side in sorted(self.operation.sides()):
            self.layer.on_dense_read(side)
        return dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            sides = " and ".join(sorted(self.operation.sides()))
            return f"LazyKV({sides}, shape={tuple(self._size)}, dtype={self.dtype}, layer={self.layer})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Asked for several times a layer: what keeps it out of graphs is no small part of it
        if torch.compiler.is_dynamo_compiling():
            return _answer_outside_of_graphs(func, args, kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **(kwargs or {}))
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_densify(args), **_densify(kwargs or {}))


class LazyScores(LazyKV):
    """
    Scores `[batch_size, num_heads, num_queries, seq_len]` of queries over lazy keys, or the weights made of them, that
    become dense only when something needs them to: when somebody reads attention weights, or still holds them before
    the layer's tokens change.

    Attributes:
        keys (`LazyKV`): the keys `[batch_size, num_heads, seq_len, head_dim]`.
        scores (`Scores`, *optional*): the steps of attention so far; `None` once the tensor is dense.
    """

    keys: LazyKV
    scores: Scores | None

    @property
    def num_tokens(self) -> int:
        return self.keys.num_tokens

    def read(self) -> torch.Tensor:
        """Make the scores dense, for good: what is written into them stays."""
        if self.scores is not None:
            self.exact, self.scores = super().read(), None
        assert self.exact is not None
        return self.exact

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.read())


def make_lazy_kv(
    layer: Any,
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    exact: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[LazyKV, LazyKV]:
    """Make all keys and all values of a layer, lazily, of `num_tokens` tokens and else of the shapes given."""
    # For every layer and token, so nothing of it is in a function of its own
    make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    batch_size, num_heads, _, head_dim = key_shape
    key_size = value_size = torch.Size((batch_size, num_heads, num_tokens, head_dim))
    if value_shape != key_shape:
        value_size = torch.Size((batch_size, value_shape[1], num_tokens, value_shape[3]))
    keys: LazyKV = make(LazyKV, key_size, dtype=dtype, device=device)
    values: LazyKV = make(LazyKV, value_size, dtype=dtype, device=device)
    keys.layer, keys.operation, keys._size = layer, STORED_KEYS, key_size
    values.layer, values.operation, values._size = layer, STORED_VALUES, value_size
    if exact is not None:
        keys.exact, values.exact = exact
        return keys, values
    dense = None if layer.handed_out is None else layer.handed_out()
    if dense is None:
        dense = DenseSides()
        layer.handed_out = HandedOut(dense)
    keys.dense = values.dense = dense
    return keys, values


def attend_lazily(
    call: AttentionCall, key: LazyKV, value: LazyKV, attend_exactly: Callable[[Any, Any], Any]
) -> Any | None:
    """
    Have the layer of keys and values answer a call without `project`, or `attend_exactly` to dense ones that it has at
    hand; `None` if these are not the newest states of one layer, or not of that form.
    """
    layer = key.layer
    if layer is not value.layer:
        return None
    if key.num_repeats == 0 or value.num_repeats == 0:
        if not all(len(each.shape) == 4 and each.token_dim == 2 for each in (key, value)):
            return None
        call = replace(call, project=partial(_project, key.operation, value.operation))
    if key.exact is not None and value.exact is not None:
        output = attend_exactly(key.exact, value.exact)
        layer.on_exact_attention(call)
        return output
    if key.num_tokens != layer.lazy_length() or value.num_tokens != key.num_tokens or key.dense or value.dense:
        return None
    attend = layer.attend if call.project is None else layer.attend_projected
    if in_caller_context():
        attend = without_caller_contexts(attend)
    if not torch.is_grad_enabled():
        return attend(call)
    with torch.no_grad():
        output = attend(call)
    return without_gradients(output) if call.query.requires_grad else output


def _project(
    keys: Operation, values: Operation, tile: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    stored = {STORED[side]: states for side, states in tile.items()}
    num_tokens = next(iter(tile.values())).shape[2]
    return keys.compute(stored, num_tokens), values.compute(stored, num_tokens)


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend by the layer where keys and values are both its lazy states, otherwise by PyTorch over dense states."""
    lazy_elsewhere = isinstance(query, LazyKV) or isinstance(attn_mask, LazyKV)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    # Dropout belongs to training, where nothing is compressed
    if isinstance(key, LazyKV) and isinstance(value, LazyKV) and not lazy_elsewhere and dropout_p == 0.0:
        output = None
        is_stored = key.layer is value.layer and key.num_repeats > 0 and value.num_repeats > 0 and not key.dense
        if is_stored and attn_mask is None and not is_causal and key.exact is None:
            output = key.layer.attend_again(query, key._size[key.token_dim], scale)
        if output is None:
            attend_exactly = partial(F.scaled_dot_product_attention, query, attn_mask=attn_mask, **options)
            output = attend_lazily(AttentionCall(query, attn_mask, is_causal, scale), key, value, attend_exactly)
        if output is not None:
            return output
    query, key, value, attn_mask = _densify((query, key, value, attn_mask))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answers a function of PyTorch that is called with lazy states among `args` and `kwargs`."""
    if func is F.scaled_dot_product_attention:
        return _scaled_dot_product_attention(*args, **kwargs)
    # Attributes such as `shape` or `dtype`, and none that holds the states themselves
    is_getter = func.__name__ == "__get__"
    if func in _METADATA_FUNCTIONS or (
        is_getter and getattr(getattr(func, "__self__", None), "__name__", "") not in _DENSE_GETTERS
    ):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for answer in (_repeat_heads, _attend_in_steps, _record):
        made = answer(func, args, kwargs)
        if made is not None:
            return made
    _refuse_access(func, args)
    return func(*_densify(args), **_densify(kwargs))


_answer_outside_of_graphs = torch.compiler.disable(_answer)


def _map_lazy(function: Callable[[LazyKV], Any], value: Any) -> Any:
    """Apply a function to all lazy states in `value`."""
    return map_nested(lambda each: function(each) if isinstance(each, LazyKV) else each, value)


def _densify(value: Any) -> Any:
    """`value` with every lazy tensor in it made dense, and the layers told so."""
    return _map_lazy(lambda states: states.read(), value)


def _refuse_access(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse writing into a dense copy, where it would be lost, and its address, which would be of freed memory."""
    name = func.__name__
    is_writing = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    states = args[0] if args and not isinstance(args[0], LazyScores) else None
    if (is_writing or name == "data_ptr") and isinstance(states, LazyKV) and states.exact is None:
        access = "writes into" if is_writing else "asks for the address of"
        message = f"the model {access} the keys or values that a cache returned (`{name}`), stored compressed"
        raise (NotImplementedError if is_writing else ValueError)(message)


def _repeat_heads(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyKV | None:
    """
    Answer the three steps by which Transformers repeats grouped heads (index with `None`, expand, reshape): the layer
    still attends to what they make; `None` of anything else.
    """
    states = args[0] if args else None
    if not isinstance(states, LazyKV) or states.num_repeats == 0:
        return None
    size, sizes = states._size, args[1:]
    if func is torch.Tensor.__getitem__ and len(size) == 4 and states.num_repeats == 1 and sizes == (_REPEAT_INDEX,):
        return _repeated(func, states, (*size[:2], 1, *size[2:]), 1, _REPEAT_INDEX)
    if func is torch.Tensor.expand and len(size) == len(sizes) == 5 and sizes == (*size[:2], sizes[2], *size[3:]):
        return _repeated(func, states, sizes, sizes[2], *size[:2], sizes[2], -1, size[4])
    if func is torch.Tensor.reshape and len(size) == 5 and sizes == (size[0], size[1] * size[2], *size[3:]):
        return _repeated(func, states, sizes, states.num_repeats, size[0], size[1] * size[2], -1, size[4])
    return None


def _repeated(func: Callable[..., Any], states: LazyKV, shape: Sequence[int], num_repeats: int, *args: Any) -> LazyKV:
    exact = None if states.exact is None else func(states.exact, *args)
    operation = Operation(func, (states.operation, *args))
    made = _derive(states, operation, shape, states.dtype, exact, len(shape) - 2, LazyKV)
    made.num_repeats = num_repeats
    return made


def _attend_in_steps(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """Answer a step of attention that a model writes out, such as `eager`; `None` of anything else."""
    if func in _TRANSPOSE and args:
        return _transpose(func, args)
    if func in _MATMUL and len(args) == 2 and not kwargs:
        first, second = args
        if isinstance(first, LazyScores):
            return _multiply_with_values(func, first, second)
        return _multiply_with_keys(func, first, second) if isinstance(second, LazyKV) else None
    found: list[LazyKV] = []
    _map_lazy(found.append, (args, kwargs))
    states = next((each for each in found if isinstance(each, LazyScores)), None)
    if states is None or not all(isinstance(each, LazyScores) and each.scores is not None for each in found):
        return None
    scores = follow(func, _map_lazy(_SCORES, args), _map_lazy(_SCORES, kwargs))
    if scores is None:
        return None
    operation = Operation(func, _map_lazy(_OPERATION, args), _map_lazy(_OPERATION, kwargs))
    exact = None if states.exact is None else func(*_map_lazy(_EXACT, args), **_map_lazy(_EXACT, kwargs))
    if func not in _MAX:
        return _derive_scores(states.keys, operation, scores, exact)
    maximum, index = (
        _derive_scores(
            states.keys, Operation(getitem, (operation, number)), each, None if exact is None else exact[number]
        )
        for number, each in enumerate((scores, replace(scores, kind="index", dtype=torch.int64)))
    )
    return torch.return_types.max((maximum, index))


def _transpose(func: Callable[..., Any], args: tuple[Any, ...]) -> LazyKV | None:
    states, dims = args[0], args[1:]
    if states.token_dim != 2 or len(states.shape) != 4 or {each % 4 for each in dims} != {2, 3}:
        return None
    shape = *states.shape[:2], states.shape[3], states.shape[2]
    exact = None if states.exact is None else func(states.exact, *dims)
    made = _derive(states, Operation(func, (states.operation, *dims)), shape, states.dtype, exact, 3, LazyKV)
    made.transposed = states
    return made


def _multiply_with_keys(func: Callable[..., Any], query: Any, transposed: LazyKV) -> LazyScores | None:
    keys = transposed.transposed
    if keys is None or isinstance(query, LazyKV) or not isinstance(query, torch.Tensor) or query.dim() != 4:
        return None
    if query.shape[:2] != keys.shape[:2] or query.shape[3] != keys.shape[3] or query.dtype != keys.dtype:
        return None
    exact = None if transposed.exact is None else func(query, transposed.exact)
    scores = Scores(AttentionCall(query, scale=1.0), keys.num_tokens, query.dtype)
    return _derive_scores(keys, Operation(func, (query, transposed.operation)), scores, exact)


def _multiply_with_values(func: Callable[..., Any], weights: LazyScores, values: Any) -> torch.Tensor | None:
    """Have the layer attend."""
    scores = weights.scores
    if scores is None or not scores.is_attention or not isinstance(values, LazyKV):
        return None
    if len(values.shape) != 4 or values.token_dim != 2 or values.shape[:2] != weights.shape[:2]:
        return None
    call, mask = scores.call, scores.call.mask
    # A new token that nothing is hidden from needs no mask, which kernels are faster without
    if mask is not None and call.query.shape[2] == 1 and mask.device.type == "cpu" and not bool(mask.any()):
        call = replace(call, mask=None)
    output: torch.Tensor | None = attend_lazily(
        call, weights.keys, values, lambda *_: func(weights.exact, values.exact)
    )
    if output is not None and weights.exact is not None:
        # Nothing more to be read of the layer
        weights.scores = None
    return output


def _derive_scores(keys: LazyKV, operation: Operation, scores: Scores, exact: torch.Tensor | None) -> LazyScores:
    dtype = scores.dtype if exact is None else exact.dtype
    made = _derive(keys, operation, scores.shape, dtype, exact, 3, LazyScores)
    made.keys, made.scores = keys, scores
    if exact is None:
        keys.layer.expect_reading(made)
    return made


def _derive(
    states: LazyKV,
    operation: Operation,
    shape: Sequence[int],
    dtype: torch.dtype,
    exact: torch.Tensor | None,
    token_dim: int,
    kind: type[_Lazy],
) -> _Lazy:
    """Make what an operation makes of `states`, lazily, which no layer attends to as it is."""
    size = torch.Size(shape)
    made: _Lazy = torch.Tensor._make_wrapper_subclass(kind, size, dtype=dtype, device=states.layer.device)  # type: ignore[assignment, attr-defined]
    made.layer, made.operation, made._size, made.token_dim = states.layer, operation, size, token_dim
    made.exact, made.dense, made.num_repeats = exact, states.dense, 0
    return made


def _record(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
    """Answer an operation that leaves every token by itself; `None` of another."""
    if func not in RECORDABLE:
        return None
    sources: list[LazyKV] = []
    _map_lazy(sources.append, (args, kwargs))
    first, num_exact = sources[0], sum(each.exact is not None for each in sources)
    if any(isinstance(each, LazyScores) for each in sources):
        return None
    if any(each.layer is not first.layer or each.num_tokens != first.num_tokens for each in sources):
        return None
    if num_exact not in (0, len(sources)):
        return None
    marked = mark_tokens(func, first, args)

    operation = Operation(func, _map_lazy(_OPERATION, marked), _map_lazy(_OPERATION, kwargs))

    def sample_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.sample() if isinstance(value, LazyKV) else value.to("meta")
        return count_for(first.num_tokens) if value is TOKENS else value

    try:
        samples = func(*map_nested(sample_of, marked), **map_nested(sample_of, kwargs))
    except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    if func is torch.Tensor.copy_ and not (isinstance(args[0], LazyKV) and write(args[0].operation, operation)):
        return None
    exact = func(*_map_lazy(_EXACT, args), **_map_lazy(_EXACT, kwargs)) if num_exact else None
    # Some return what they are given, if nothing is to be done
    known = next((each for each in sources if each.sample() is samples), None)
    if known is not None:
        return known
    if isinstance(samples, torch.Tensor):
        return _recorded(func, first, operation, samples, exact)
    parts = tuple(
        _recorded(func, first, Operation(getitem, (operation, number)), each, None if exact is None else exact[number])
        for number, each in enumerate(samples)
    )
    return None if any(part is None for part in parts) else parts


def _recorded(
    func: Callable[..., Any], states: LazyKV, operation: Operation, sample: torch.Tensor, exact: Any
) -> LazyKV | None:
    token_dim = find_tokens(func, states, sample)
    if token_dim is None:
        return None
    shape = *sample.shape[:token_dim], states.num_tokens, *sample.shape[token_dim + 1 :]
    made = _derive(states, operation, shape, sample.dtype, exact, token_dim, LazyKV)
    made._sample = sample
    return made
