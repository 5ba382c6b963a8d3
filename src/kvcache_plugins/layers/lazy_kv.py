"""Lazy keys and values: tensors that refer to a layer, and become dense if something needs their values.

`Cache.update` gets no query and the attention function gets no cache, so a compressed cache would have to return
dense tensors, or patch models. A `LazyKV` is the third way: a tensor that reports the dense shape, dtype and device
but only refers to its layer. `torch.nn.functional.scaled_dot_product_attention` and the functions of
`attention_functions` let the layer compute attention over it, and nothing is made dense. Attention that a model writes
out in functions of PyTorch is recorded step by step: `attention_steps` has the steps of repeated heads and of
attention such as `eager`, and `latent_attention` those of latent states. Each step returns another `LazyKV`; for the
last one, the product with values, the layer computes attention.

Any other function gets the dense tensor, computed by the steps so far: correct, and slower. Attention weights become
dense when they are read, or when the layer changes while a caller holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
import torch.nn.functional as F

from kvcache_plugins.formats.parts import SIDES
from kvcache_plugins.kernels.attention_call import AttentionCall

from .attention_steps import (
    JOINING,
    MATMUL,
    STEPS,
    SYMMETRIC,
    Arguments,
    Function,
    KeywordArguments,
    Scores,
    Stored,
    functions,
    multiply_with_queries,
)
from .latent_attention import LATENT_STEPS, LatentAttention
from .torch_contexts import in_caller_context, without_caller_contexts, without_gradients


KEYS, VALUES = Stored("keys"), Stored("values")
_DENSE_GETTERS = {"T", "H", "mT", "mH", "real", "imag", "data", "grad"}
_METADATA_FUNCTIONS = functions("size", "dim", "numel", "__len__", "element_size", "is_floating_point", "__hash__")


class Attending(Protocol):
    """Layer of lazy tensors, or another object that computes attention over them."""

    handed_out: HandedOut

    @property
    def device(self) -> torch.device: ...

    def lazy_length(self) -> int:
        """Return the number of tokens that the newest lazy tensors report."""

    def to_dense(self, side: str) -> torch.Tensor:
        """Make all `"keys"` or `"values"` dense."""

    def note_dense_read(self, side: str) -> None:
        """Count that something other than attention has made one side dense."""

    def run_plan(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        """Attend by the plan of the last step, if there is one."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention for a call without `project`."""

    def on_exact_attention(self, call: AttentionCall) -> None:
        """Learn that attention over exact states was computed."""


class Source(dict[str, torch.Tensor]):
    """
    Layer of lazy tensors, and its dense keys and values, which are empty until the layer changes stored tokens.
    """

    __slots__ = ("__weakref__", "layer")
    layer: Attending


class HandedOut:
    """
    Lazy tensors of a layer that callers may still hold; a copy of the layer has none.

    Attributes:
        source (`ref[Source]`, *optional*): source that keys and values share.
        scores (`list[ref[LazyKV]]`): attention scores and weights, which become dense before the next update.
        has_gradients (`bool`): True if autograd records the newest states, which a copy has too.
    """

    __slots__ = ("has_gradients", "scores", "source")

    def __init__(self, has_gradients: bool = False) -> None:
        self.source: ref[Source] | None = None
        self.scores: list[ref[LazyKV]] = []
        self.has_gradients = has_gradients

    def __reduce__(self) -> tuple[type[HandedOut], tuple[bool]]:
        return HandedOut, (self.has_gradients,)

    @without_caller_contexts
    def read_scores(self) -> None:
        """Make scores dense that a caller still holds, before stored tokens change."""
        for scores in [each() for each in self.scores]:
            if scores is not None:
                scores.read()
        self.scores = []

    @without_caller_contexts
    def keep(self, layer: Attending) -> None:
        """Make keys and values of `layer` dense that a caller still holds, before stored tokens change."""
        source = None if self.source is None else self.source()
        self.source = None
        if source is not None:
            # A layer that has evicted tokens has no dense states: reading the lazy states raises the error
            with suppress(ValueError):
                source.update({side: layer.to_dense(side) for side in SIDES})


class LazyKV(torch.Tensor):
    """
    Keys or values of a layer, or the result of steps of attention on them, without their values.

    Attributes:
        source (`Source`): the layer, or another object that computes attention.
        meaning (`Stored` or a meaning of a step, *optional*): its role in attention; `None` once it is dense.
        recipe (`tuple`, *optional*): function and arguments that make it; `None` for keys and values of the layer.
        numbers (`torch.Tensor`, *optional*): the dense tensor, if it is known.
        is_exact (`bool`): True if it is made of an uncommitted prompt, whose dense tensors are known.
    """

    source: Source
    meaning: Any
    recipe: tuple[Function, Arguments, KeywordArguments] | None = None
    numbers: torch.Tensor | None = None
    is_exact: bool = False
    # Attributes of each tensor, which hide those of `torch.Tensor`: models read them several times a layer
    shape: torch.Size = torch.Size()
    dtype: torch.dtype = torch.float32

    def derive(self, meaning: Any, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> LazyKV:
        """Return the result of a step on this tensor, of the same shape and dtype by default."""
        size = self.shape if shape is None else torch.Size(shape)
        made = _make(size, dtype or self.dtype, self.source, meaning)
        made.is_exact = self.is_exact
        return made

    def densify(self, *, is_read: bool = False) -> torch.Tensor:
        """Compute the dense tensor. If it `is_read` by something other than attention, the layer counts that."""
        if self.recipe is not None:
            function, args, kwargs = self.recipe
            dense: torch.Tensor = function(*_densify(args, is_read=is_read), **_densify(kwargs, is_read=is_read))
            if self.is_exact or self.meaning.is_kept:
                self.numbers, self.recipe = dense, None
            if self.meaning.is_kept and not self.is_exact:
                self.meaning = None
            return dense
        dense = self._read_layer() if self.numbers is None else self.numbers
        if is_read and isinstance(self.meaning, Stored):
            self.source.layer.note_dense_read(self.meaning.side)
        return dense

    def read(self) -> torch.Tensor:
        """Compute the dense tensor for a function that is no attention."""
        return self.densify(is_read=True)

    def _read_layer(self) -> torch.Tensor:
        layer, side = self.source.layer, self.meaning.side
        num_tokens = self.shape[2]
        stored = self.source[side] if self.source else layer.to_dense(side)
        if stored.shape[2] < num_tokens:
            raise RuntimeError("these lazy states are older than the last `crop` or `reset` of their cache")
        stored = stored[:, :, :num_tokens]
        return without_gradients(stored) if layer.handed_out.has_gradients and torch.is_grad_enabled() else stored

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self.meaning is None or isinstance(self.meaning, Scores):
            return repr(self.read())
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(self.shape)
            return f"LazyKV({self.meaning}, shape={shape}, dtype={self.dtype}, layer={self.source.layer})"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: object, args: Arguments = (), kwargs: KeywordArguments | None = None
    ) -> Any:
        # First, as a function that is disabled in graphs costs more, and this is called several times a layer
        if torch.compiler.is_dynamo_compiling():
            return _answer_outside_of_graphs(func, args, kwargs or {})
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return _answer(func, args, kwargs)
        is_lazy = len(args) == 3 and type(args[1]) is type(args[2]) is LazyKV and type(args[0]) is not LazyKV
        if is_lazy and not (kwargs.get("attn_mask") is not None or kwargs.get("is_causal") or kwargs.get("dropout_p")):
            # Inlined, as each decoded token takes this way in each layer
            query, keys, values = args
            of_keys = keys.meaning
            of_values = values.meaning
            is_stored = isinstance(of_keys, Stored) and isinstance(of_values, Stored)
            is_pair = is_stored and of_keys.side == "keys" and of_values.side == "values"
            if is_pair and keys.source is values.source and not keys.source and not keys.is_exact:
                output = keys.source.layer.run_plan(query, keys.shape[2], kwargs.get("scale"))
                if output is not None:
                    return output
        return _scaled_dot_product_attention(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: object, args: Arguments = (), kwargs: KeywordArguments | None = None
    ) -> Any:
        return func(*_read(args), **_read(kwargs or {}))


def _make(size: torch.Size, dtype: torch.dtype, source: Source, meaning: Any) -> LazyKV:
    made: LazyKV = torch.Tensor._make_wrapper_subclass(LazyKV, size, dtype=dtype, device=source.layer.device)  # type: ignore[attr-defined]
    made.shape, made.dtype = size, dtype
    made.source, made.meaning = source, meaning
    return made


def make_lazy_kv(
    layer: Attending,
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    exact: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[LazyKV, LazyKV]:
    """Make all keys and all values of a layer, lazily, of `num_tokens` tokens and otherwise of the shapes given."""
    # Everything inlined, as it runs for every layer and token
    source = None
    if exact is None and layer.handed_out.source is not None:
        source = layer.handed_out.source()
    if source is None:
        source = Source()
        source.layer = layer
        if exact is None:
            layer.handed_out.source = ref(source)
    make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    batch_size, num_heads, _, head_dim = key_shape
    key_size = value_size = torch.Size((batch_size, num_heads, num_tokens, head_dim))
    if value_shape != key_shape:
        value_size = torch.Size((batch_size, value_shape[1], num_tokens, value_shape[3]))
    keys: LazyKV = make(LazyKV, key_size, dtype=dtype, device=device)
    values: LazyKV = make(LazyKV, value_size, dtype=dtype, device=device)
    keys.source = values.source = source
    keys.dtype = values.dtype = dtype
    keys.meaning, values.meaning = KEYS, VALUES
    keys.shape, values.shape = key_size, value_size
    if exact is not None:
        keys.numbers, values.numbers = exact
        keys.is_exact = values.is_exact = True
    return keys, values


def attend_lazily(
    call: AttentionCall,
    keys: LazyKV,
    values: LazyKV,
    attend_exactly: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """
    Let the layer of keys and values compute attention without `project`, or `attend_exactly` over dense tensors if
    they are exact. Return `None` if they are not the newest of one layer, or are results of other steps.
    """
    source, num_tokens = keys.source, keys.shape[2]
    latent = None
    layer = source.layer
    if values.source is not source or values.shape[2] != num_tokens:
        return None
    if not _is_stored(keys, "keys") or not _is_stored(values, "values"):
        latent = LatentAttention.find(keys, values)
        if latent is None:
            return None
    if keys.is_exact:
        output = attend_exactly(keys.densify(), values.densify())
        layer.on_exact_attention(call if latent is None else replace(call, project=latent.expand))
        return output
    if num_tokens != layer.lazy_length() or source:
        return None
    attend = layer.attend if latent is None else partial(latent.attend, layer)
    if in_caller_context():
        attend = without_caller_contexts(attend)
    if not torch.is_grad_enabled():
        return attend(call)
    with torch.no_grad():
        output = attend(call)
    return without_gradients(output) if call.query.requires_grad else output


def _is_stored(states: LazyKV, side: str) -> bool:
    meaning = states.meaning
    return isinstance(meaning, Stored) and meaning.side == side and len(states.shape) == 4


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
    """Let the layer attend if keys and values are both its lazy tensors, and PyTorch over dense ones otherwise."""
    lazy_elsewhere = isinstance(query, LazyKV) or isinstance(attn_mask, LazyKV)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    # Dropout belongs to training, where nothing is compressed
    if isinstance(key, LazyKV) and isinstance(value, LazyKV) and not lazy_elsewhere and dropout_p == 0.0:
        attend_exactly = partial(F.scaled_dot_product_attention, query, attn_mask=attn_mask, **options)
        output = attend_lazily(AttentionCall(query, attn_mask, is_causal, scale), key, value, attend_exactly)
        if output is not None:
            return output
    query, key, value, attn_mask = _read((query, key, value, attn_mask))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)


def _answer(func: Function, args: Arguments, kwargs: KeywordArguments) -> Any:
    """Compute a function of PyTorch that is called with lazy tensors among `args` and `kwargs`."""
    if func is F.scaled_dot_product_attention:
        return _scaled_dot_product_attention(*args, **kwargs)
    # Attributes such as `device`, but none that holds the values
    is_getter = func.__name__ == "__get__"
    if func in _METADATA_FUNCTIONS or (
        is_getter and getattr(getattr(func, "__self__", None), "__name__", "") not in _DENSE_GETTERS
    ):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    made = _follow(func, args, kwargs)
    if made is not None:
        return made
    _refuse_access(func, args)
    return func(*_read(args), **_read(kwargs))


_answer_outside_of_graphs = torch.compiler.disable(_answer)


def _follow(func: Function, args: Arguments, kwargs: KeywordArguments) -> Any:
    """Return the result of a step of attention, or `None` if the function is no step."""
    given = args
    if func in JOINING and args and isinstance(args[0], list | tuple):
        given = *args[0], *args[1:]
    elif func in SYMMETRIC and args and isinstance(args[-1], LazyKV):
        given = args[::-1]
    first = next((each for each in given if isinstance(each, LazyKV)), None)
    step = None if first is None else _STEPS.get((func, type(first.meaning)))
    # Queries alone come before what is lazy
    if step is None or (first is not given[0] and step is not multiply_with_queries):
        return None
    try:
        made = step(*given, **kwargs)
    except TypeError:
        # Attention never has these options
        return None
    if isinstance(made, tuple):
        for number, each in enumerate(made):
            _note_recipe(each, _take_item, (number, func, args, kwargs), {})
        return torch.return_types.max(made) if func in _MAX else made
    if isinstance(made, LazyKV) and made is not first:
        _note_recipe(made, func, args, kwargs)
    return made


def _note_recipe(made: LazyKV, function: Function, args: Arguments, kwargs: KeywordArguments) -> None:
    made.recipe = function, args, kwargs
    if isinstance(made.meaning, Scores) and not made.is_exact:
        made.source.layer.handed_out.scores.append(ref(made))


def _take_item(number: int, function: Function, args: Arguments, kwargs: KeywordArguments) -> Any:
    return function(*args, **kwargs)[number]


def _multiply_with_values(weights: LazyKV, values: object) -> torch.Tensor | None:
    """Let the layer attend."""
    scores = weights.meaning
    if not scores.is_attention or not isinstance(values, LazyKV) or values.shape[:2] != weights.shape[:2]:
        return None
    call, mask = scores.call, scores.call.mask
    # A new token to which no token is hidden needs no mask, and kernels are faster without one
    if mask is not None and call.query.shape[2] == 1 and mask.device.type == "cpu" and not bool(mask.any()):
        call = replace(call, mask=None)
    return attend_lazily(call, scores.keys, values, lambda _, dense: torch.matmul(weights.densify(), dense))


_STEPS: dict[tuple[Function, type], Function] = {
    **STEPS,
    **LATENT_STEPS,
    **{(function, Scores): _multiply_with_values for function in MATMUL},
}
_MAX = functions("max")


def _map_lazy(function: Callable[[LazyKV], torch.Tensor], value: Any) -> Any:
    """Apply a function to all lazy tensors that tuples, lists and dictionaries hold."""
    if isinstance(value, LazyKV):
        return function(value)
    if isinstance(value, tuple | list):
        made = [_map_lazy(function, each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {name: _map_lazy(function, each) for name, each in value.items()}
    return value


def _densify(value: Any, *, is_read: bool) -> Any:
    return _map_lazy(lambda lazy: lazy.densify(is_read=is_read), value)


def _read(value: Any) -> Any:
    return _densify(value, is_read=True)


def _refuse_access(func: Function, args: Arguments) -> None:
    """Refuse to write into a dense copy, where it would be lost, and to give its address, as it is freed at once."""
    name, states = func.__name__, args[0] if args else None
    is_writing = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if not isinstance(states, LazyKV) or not (is_writing or name == "data_ptr"):
        return
    if states.meaning is not None and not states.meaning.is_kept and not states.is_exact:
        access = "writes into" if is_writing else "asks for the address of"
        message = f"the model {access} the keys or values that a cache returned (`{name}`), stored compressed"
        raise (NotImplementedError if is_writing else ValueError)(message)
