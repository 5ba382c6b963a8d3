"""The seam between caches and attention: states that stay lazy until attention asks for them.

`Cache.update` gets no query and the attention function gets no cache, so a compressed cache would have to hand back
dense tensors, or patch models. `LazyStates` is the third way: a tensor that reports the dense shape, dtype and device
but only refers to its layer. It is asked through two doors:

- Given to `torch.nn.functional.scaled_dot_product_attention`, it calls the layer's `attend`: nothing is made dense.
- Where attention is written out, as softcaps, sinks and biases need it, the product with keys is the scores, and the
  product of weights with values their sum, made a tile of tokens at a time: see `lazy_products`.

What models do to states on the way (transposing, repeating heads, splitting, projecting) is carried along as a view,
see `view_steps`. Anything else (a user's own attention) gets the dense tensor: right, and slower.

What a layer has to offer for that is `StatesSource`; `lazy_layer.LazyLayer` is the base of every layer that does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .contexts import in_own_context, is_foreign_context, without_gradients
from .lazy_products import ADDING, FACTORS, attend_views, multiply
from .lazy_views import Blank, BlankPart, Step, StoredSide, View
from .states_source import StatesSource
from .view_steps import Layout, TokenStep, find_steps


_REPEAT_INDEX = (slice(None), slice(None), None, slice(None), slice(None))
_STORED_KEYS, _STORED_VALUES = StoredSide("keys"), StoredSide("values")
_STORED_SIDES: dict[str, View] = {"keys": _STORED_KEYS, "values": _STORED_VALUES}
_DENSE_GETTERS = {"T", "H", "mT", "mH", "real", "imag", "data", "grad"}


class LazyStates(torch.Tensor):
    """
    Keys or values of a layer, `[batch_size, num_heads, seq_len, head_dim]`, or a view of them, that become dense only
    when something needs them to.

    Attributes:
        layer (`StatesSource`): the layer they belong to.
        origin (`View`): what they are of what the layer stores.
        token_dim (`int`): the dimension that tokens are in.
        exact (`torch.Tensor`, *optional*): the dense states, where the layer has them at hand (a prompt before its
            compression).
        num_repeats (`int`): how many query heads each head has been expanded to; 0 if these are no longer what the
            layer's `attend` is over.
    """

    layer: StatesSource
    origin: View
    token_dim: int = 2
    exact: torch.Tensor | None = None
    num_repeats: int = 1
    _size: torch.Size

    @staticmethod
    def __new__(
        cls,
        layer: StatesSource,
        origin: str | View,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        exact: torch.Tensor | None = None,
        num_repeats: int = 1,
        token_dim: int = 2,
    ) -> "LazyStates":
        origin = _STORED_SIDES[origin] if isinstance(origin, str) else origin
        size = torch.Size(shape)
        states: LazyStates = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)  # type: ignore[assignment, attr-defined]
        states.layer, states.origin, states._size = layer, origin, size
        states.exact, states.num_repeats, states.token_dim = exact, num_repeats, token_dim
        return states

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is set in `__new__`: a tensor's shape is fixed when it is made."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Tells the size as any tensor does; models ask several times a layer, and `torch.compile` traces this."""
        return self._size

    @property
    def num_tokens(self) -> int:
        return self._size[self.token_dim]

    def step_layout(self) -> Layout:
        """What steps ask of them."""
        with torch._C.DisableTorchFunctionSubclass():
            return Layout(tuple(self._size), self.dtype, self.device, self.token_dim)

    def seen_through(self, step: TokenStep, origin: View | None = None) -> "LazyStates":
        """What a step makes of them; its view can be given."""
        layout = self.step_layout()
        exact = None if self.exact is None else step.function(self.exact)
        shape, dtype = step.shape, layout.dtype
        if exact is not None:
            shape, dtype = tuple(exact.shape), exact.dtype
        elif shape is None:
            seen = step.function(torch.empty(layout.shape, dtype=dtype, device="meta"))
            shape, dtype = tuple(seen.shape), seen.dtype
        view = Step(step.function, self.origin, only_moves=step.only_moves) if origin is None else origin
        return LazyStates(self.layer, view, shape, dtype, layout.device, exact, 0, step.token_dim)

    def densify(self) -> torch.Tensor:
        """The dense states, in the shape reported."""
        if self.exact is not None:
            return self.exact
        sides = sorted(self.origin.sides)
        dense = self.origin.of({side: self._newest(self.layer.materialize(side)) for side in sides})
        return without_gradients(dense) if self.layer.has_gradients and torch.is_grad_enabled() else dense

    def _newest(self, dense: torch.Tensor) -> torch.Tensor:
        if dense.shape[2] < self.num_tokens:
            raise RuntimeError("these lazy states are older than the last `crop` or `reset` of their cache")
        return dense[:, :, : self.num_tokens]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            sides = " and ".join(sorted(self.origin.sides))
            return f"LazyStates({sides}, shape={tuple(self._size)}, dtype={self.dtype}, layer={self.layer})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Asked for several times a layer: what keeps it out of graphs is no small part of it
        if torch.compiler.is_dynamo_compiling():
            return _answer_outside_of_graphs(func, args, kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **(kwargs or {}))
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*_densify(args), **_densify(kwargs or {}))


def stored_states(
    layer: StatesSource,
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    exact: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[LazyStates, LazyStates]:
    """
    Make all keys and all values of a layer, lazily, of `num_tokens` tokens and else of the shapes given.

    Made for every layer and token, so not by way of `LazyStates(...)`, which costs several times as much.
    """
    make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    batch_size, num_heads, _, head_dim = key_shape
    key_size = value_size = torch.Size((batch_size, num_heads, num_tokens, head_dim))
    if value_shape != key_shape:
        value_size = torch.Size((batch_size, value_shape[1], num_tokens, value_shape[3]))
    keys: LazyStates = make(LazyStates, key_size, dtype=dtype, device=device)
    values: LazyStates = make(LazyStates, value_size, dtype=dtype, device=device)
    keys.layer, keys.origin, keys._size = layer, _STORED_KEYS, key_size
    values.layer, values.origin, values._size = layer, _STORED_VALUES, value_size
    if exact is not None:
        keys.exact, values.exact = exact
    return keys, values


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function makes of lazy states."""
    if func is F.scaled_dot_product_attention:
        return _scaled_dot_product_attention(*args, **kwargs)
    if func in FACTORS or func in ADDING:
        product = _product(func, args, kwargs)
        if product is not None:
            return product
    elif isinstance(args[0], LazyStates):
        seen = _see(func, args[0], args[1:], kwargs)
        if seen is not None:
            return seen
    elif func in _JOINING:
        joined = _join(args[0], **kwargs) if len(args) == 1 else _join(*args, **kwargs)
        if joined is not None:
            return joined
    if func in _METADATA_FUNCTIONS or _is_metadata_getter(func):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    _refuse_access(func, args)
    return func(*_densify(args), **_densify(kwargs))


_answer_outside_of_graphs = torch.compiler.disable(_answer)


def _is_metadata_getter(func: Callable[..., Any]) -> bool:
    """Whether `func` reads an attribute such as `shape` or `dtype`, and none that holds the states themselves."""
    return (
        func.__name__ == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _DENSE_GETTERS
    )


def _densify(value: Any) -> Any:
    """`value` with every lazy tensor in it made dense, and the layers told so."""
    if isinstance(value, LazyStates):
        dense = value.densify()
        for side in sorted(value.origin.sides):
            value.layer.on_dense_read(side)
        return dense
    if isinstance(value, (list, tuple)):
        return type(value)(_densify(item) for item in value)
    if isinstance(value, dict):
        return {key: _densify(item) for key, item in value.items()}
    return value


def _refuse_access(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse writing into a dense copy, where it would be lost, and its address, which would be of freed memory."""
    name = func.__name__
    is_writing = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if (is_writing or name == "data_ptr") and args and isinstance(args[0], LazyStates) and args[0].exact is None:
        access = "writes into" if is_writing else "asks for the address of"
        message = f"the model {access} the keys or values that a cache returned (`{name}`), stored compressed"
        raise (NotImplementedError if is_writing else ValueError)(message)


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
    """
    The layer's own attention where keys and values are both its lazy states, PyTorch's over dense states otherwise.
    """
    lazy_elsewhere = isinstance(query, LazyStates) or isinstance(attn_mask, LazyStates)
    # Dropout belongs to training, where nothing is compressed
    if isinstance(key, LazyStates) and isinstance(value, LazyStates) and not lazy_elsewhere and dropout_p == 0.0:
        output = None
        if key.layer is value.layer:
            is_stored = key.num_repeats > 0 and value.num_repeats > 0
            if is_stored and attn_mask is None and not is_causal and key.exact is None:
                output = key.layer.attend_again(query, key._size[key.token_dim], scale)
            if output is None:
                attend = _attend if is_stored else attend_views
                output = attend(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if output is not None:
            return output
    query, key, value, attn_mask = _densify((query, key, value, attn_mask))
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)


def _attend(
    query: torch.Tensor,
    key: LazyStates,
    value: LazyStates,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """Attention over what a layer stores; `None` if these are not its newest states."""
    layer = key.layer
    if key.exact is not None and value.exact is not None:
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        output = F.scaled_dot_product_attention(query, key.exact, value.exact, attn_mask=attn_mask, **options)
        layer.on_exact_attention(query, attn_mask, is_causal=is_causal, scale=scale)
        return output
    if key.num_tokens != layer.lazy_length():
        return None
    attend = in_own_context(layer.attend) if is_foreign_context() else layer.attend
    if not torch.is_grad_enabled():
        return attend(query, attn_mask, is_causal=is_causal, scale=scale)
    with torch.no_grad():
        output = attend(query, attn_mask, is_causal=is_causal, scale=scale)
    return without_gradients(output) if query.requires_grad else output


def _product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A product of attention; `None` if it is another."""
    if func in ADDING:
        return _adding_product(*args, **kwargs)
    left, right = FACTORS[func](*args, **kwargs)
    if isinstance(left, LazyStates) or not isinstance(right, LazyStates):
        return None
    return multiply(left, right)


def _adding_product(
    bias: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor | None:
    if isinstance(batch1, LazyStates) or not isinstance(batch2, LazyStates):
        return None
    product = multiply(batch1, batch2)
    if product is None:
        return None
    product = product * alpha
    # As PyTorch: what is multiplied by 0 may be anything
    return product if beta == 0 else product + beta * bias


def _see(func: Callable[..., Any], states: LazyStates, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation that leaves every token by itself makes of states; `None` if it is another."""
    if func is torch.Tensor.new_empty:
        return _new_empty(states, *args, **kwargs)
    if func is torch.Tensor.copy_:
        return _copy_into(states, *args)
    if any(isinstance(each, LazyStates) for each in (*args, *kwargs.values())):
        return None
    steps = find_steps(func, states.step_layout(), args, kwargs)
    if isinstance(steps, list):
        return tuple(states.seen_through(step) for step in steps)
    return None if steps is None else _seen_once(func, states, args, steps)


def _seen_once(func: Callable[..., Any], states: LazyStates, args: tuple[Any, ...], step: TokenStep) -> LazyStates:
    if isinstance(states.origin, Blank) and func is torch.Tensor.__getitem__:
        return states.seen_through(step, BlankPart(states.origin, args[0]))
    seen = states.seen_through(step)
    if seen.shape == states.shape and seen.dtype == states.step_layout().dtype and func in _KEEPING:
        return states
    seen.num_repeats = _num_repeats(func, states, args, seen)
    return seen


def _num_repeats(func: Callable[..., Any], states: LazyStates, args: tuple[Any, ...], seen: LazyStates) -> int:
    """
    To how many query heads each head is expanded now. The three steps by which Transformers repeats grouped heads
    (index with `None`, expand, reshape) leave what the layer attends to; others do not.
    """
    before, after = tuple(states.shape), tuple(seen.shape)
    if states.num_repeats == 0:
        return 0
    if func is torch.Tensor.__getitem__:
        return int(len(before) == 4 and states.num_repeats == 1 and args[0] == _REPEAT_INDEX)
    if func is torch.Tensor.expand and len(before) == len(after) == 5 and before[2] == 1:
        return after[2] if after[:2] == before[:2] and after[3:] == before[3:] else 0
    if func is torch.Tensor.reshape and len(before) == 5:
        return states.num_repeats if after == (before[0], before[1] * before[2], *before[3:]) else 0
    return 0


def _new_empty(states: LazyStates, *sizes: Any, **options: Any) -> LazyStates | None:
    """Room for what is made of the same tokens."""
    shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    layout = states.step_layout()
    if options or len(shape) <= layout.token_dim or shape[layout.token_dim] != layout.num_tokens:
        return None
    exact = None if states.exact is None else states.exact.new_empty(shape)
    blank = Blank(shape, layout.token_dim, layout.dtype, layout.device)
    return LazyStates(states.layer, blank, shape, layout.dtype, layout.device, exact, 0, layout.token_dim)


def _copy_into(room: LazyStates, source: torch.Tensor) -> LazyStates | None:
    if not isinstance(source, LazyStates) or not isinstance(room.origin, BlankPart) or source.layer is not room.layer:
        return None
    if room.exact is not None:
        room.exact.copy_(source.densify())
    room.origin.copy_(source.origin)
    return room


def _join(parts: Any, dim: int = 0) -> LazyStates | None:
    """States of one layer side by side, not one after another."""
    first = parts[0]
    if not all(isinstance(part, LazyStates) and part.layer is first.layer for part in parts):
        return None
    layouts = [part.step_layout() for part in parts]
    if len({(each.token_dim, each.num_tokens, each.dtype) for each in layouts}) > 1:
        return None
    place = dim % len(layouts[0].shape)
    if place == first.token_dim:
        return None
    has_exact = all(part.exact is not None for part in parts)
    if not has_exact and any(part.exact is not None for part in parts):
        return None
    shape = list(layouts[0].shape)
    shape[place] = sum(each.shape[place] for each in layouts)
    exact = torch.cat([part.exact for part in parts], dim=place) if has_exact else None
    view = Step(lambda *tiles: torch.cat(tiles, dim=place), *(part.origin for part in parts))
    return LazyStates(first.layer, view, tuple(shape), layouts[0].dtype, layouts[0].device, exact, 0, first.token_dim)


# What changes nothing of states that are in the right form already
_KEEPING = {torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.float, torch.Tensor.detach}
_JOINING = {torch.cat, torch.concat}
_METADATA_FUNCTIONS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.__hash__,
    torch.is_floating_point,
}
