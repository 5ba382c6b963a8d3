"""The seam between caches and attention: states that stay lazy until attention asks for them.

`Cache.update` gets no query and the attention function gets no cache, so a compressed cache would have to hand back
dense tensors, or patch models. `LazyStates` is the third way: a tensor that reports the dense shape, dtype and device
but only refers to its layer.

- Given to `torch.nn.functional.scaled_dot_product_attention`, it calls the layer's `attend`: nothing is made dense.
- The three steps by which Transformers repeats grouped key/value heads (index with `None`, expand, reshape) are
  carried along as a view.
- Anything else (eager or flash attention, a user's own code) gets the dense tensor: right, and slower.

What a layer has to offer for that is `StatesSource`; `lazy_layer.LazyLayer` is the base of every layer that does.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F


_REPEAT_INDEX = (slice(None), slice(None), None, slice(None), slice(None))
_DENSE_GETTERS = {"T", "H", "mT", "mH", "real", "imag", "data", "grad"}


class StatesSource(Protocol):
    """What lazy states ask of the layer that they belong to; see `LazyLayer`, which says what each is."""

    has_gradients: bool

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        """Attention of `query` over everything the layer holds."""

    def materialize(self, side: str) -> torch.Tensor:
        """All `"keys"` or `"values"`, dense."""

    def lazy_length(self) -> int:
        """Tokens that the newest lazy states report."""

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        """Called after attention over exact states."""

    def on_dense_read(self, side: str) -> None:
        """Called when something other than attention has made one side dense."""


class LazyStates(torch.Tensor):
    """
    Keys or values of a layer, `[batch_size, num_heads, seq_len, head_dim]`, that become dense only when something
    needs them to.

    Attributes:
        layer (`StatesSource`): the layer they belong to.
        side (`str`): `"keys"` or `"values"`.
        exact (`torch.Tensor`, *optional*): the dense states, where the layer has them at hand (a prompt before its
            compression).
        num_repeats (`int`): how many query heads each head has been expanded to.
    """

    layer: StatesSource
    side: str
    exact: torch.Tensor | None
    num_repeats: int
    _size: torch.Size

    @staticmethod
    def __new__(
        cls,
        layer: StatesSource,
        side: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        exact: torch.Tensor | None = None,
        num_repeats: int = 1,
    ) -> "LazyStates":
        states: LazyStates = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[assignment, attr-defined]
        states.layer, states.side, states.exact, states.num_repeats = layer, side, exact, num_repeats
        states._size = torch.Size(shape)
        return states

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is set in `__new__`: a tensor's shape is fixed when it is made."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """As any tensor's; models ask for it several times a layer, so it does not go through `__torch_function__`."""
        return self._size

    def view_as_repeated(self, shape: tuple[int, ...], num_repeats: int) -> "LazyStates":
        """The same states under another shape of the head dimensions."""
        with torch._C.DisableTorchFunctionSubclass():
            return LazyStates(self.layer, self.side, shape, self.dtype, self.device, self.exact, num_repeats)

    def densify(self) -> torch.Tensor:
        """The dense states, in the shape reported."""
        shape = tuple(self._size)
        dense = self.exact if self.exact is not None else self.layer.materialize(self.side)
        if dense.shape[2] < shape[-2]:
            raise RuntimeError("these lazy states are older than the last `crop` or `reset` of their cache")
        dense = dense[:, :, : shape[-2]]
        if self.exact is None and self.layer.has_gradients and torch.is_grad_enabled():
            dense = _without_gradients(dense)
        if len(shape) == 5:
            return dense.unsqueeze(2).expand(shape)
        return dense if self.num_repeats == 1 else dense.repeat_interleave(self.num_repeats, dim=1)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyStates({self.side}, shape={tuple(self._size)}, dtype={self.dtype}, layer={self.layer})"

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **kwargs)
        handler = _LAZY_FUNCTIONS.get(func)
        if handler is not None and isinstance(args[0], LazyStates):
            result = handler(*args, **kwargs)
            if result is not None:
                return result
        if func in _METADATA_FUNCTIONS or _is_metadata_getter(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_densify(args), **_densify(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*_densify(args), **_densify(kwargs or {}))


def _is_metadata_getter(func: Callable[..., Any]) -> bool:
    """Whether `func` reads an attribute such as `shape` or `dtype`, and none that holds the states themselves."""
    return (
        func.__name__ == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _DENSE_GETTERS
    )


def _densify(value: Any) -> Any:
    """`value` with every lazy tensor in it made dense, and the layers told so."""
    if isinstance(value, LazyStates):
        dense = value.densify()
        value.layer.on_dense_read(value.side)
        return dense
    if isinstance(value, (list, tuple)):
        return type(value)(_densify(item) for item in value)
    if isinstance(value, dict):
        return {key: _densify(item) for key, item in value.items()}
    return value


def _without_gradients(states: torch.Tensor) -> torch.Tensor:
    """`states` for a forward pass that autograd records. A backward pass to them raises."""
    states = states.detach().requires_grad_()
    states.register_hook(_refuse_gradients)
    return states


def _refuse_gradients(gradient: torch.Tensor) -> None:
    raise NotImplementedError(
        "gradients do not flow through what a cache has stored: only the first forward through an empty one is exact. "
        "Train without `past_key_values`, or with a `DynamicCache`"
    )


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
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    lazy_elsewhere = isinstance(query, LazyStates) or isinstance(attn_mask, LazyStates)
    # Dropout belongs to training, where nothing is compressed
    if isinstance(key, LazyStates) and isinstance(value, LazyStates) and not lazy_elsewhere and dropout_p == 0.0:
        layer = key.layer if key.layer is value.layer else None
        if layer is not None and key.exact is not None:
            dense = key.densify(), value.densify()
            output = F.scaled_dot_product_attention(query, *dense, attn_mask=attn_mask, **options)
            layer.on_exact_attention(query, attn_mask, is_causal=is_causal, scale=scale)
            return output
        if layer is not None and key.shape[-2] == layer.lazy_length():
            with torch.no_grad():
                output = layer.attend(query, attn_mask, is_causal=is_causal, scale=scale)
            return _without_gradients(output) if torch.is_grad_enabled() and query.requires_grad else output
    query, key, value, attn_mask = _densify((query, key, value, attn_mask))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)


def _lazy_getitem(states: LazyStates, index: Any) -> LazyStates | None:
    if states.dim() == 4 and states.num_repeats == 1 and isinstance(index, tuple) and index == _REPEAT_INDEX:
        batch_size, num_heads, length, head_dim = states.shape
        return states.view_as_repeated((batch_size, num_heads, 1, length, head_dim), 1)
    return None


def _lazy_expand(states: LazyStates, *sizes: Any) -> LazyStates | None:
    target = tuple(sizes[0]) if len(sizes) == 1 else sizes
    shape = tuple(states.shape)
    if len(shape) == len(target) == 5 and shape[2] == 1 and target[:2] == shape[:2] and target[3:] == shape[3:]:
        return states.view_as_repeated(target, target[2])
    return None


def _lazy_reshape(states: LazyStates, *sizes: Any) -> LazyStates | None:
    target = tuple(sizes[0]) if len(sizes) == 1 else sizes
    shape = tuple(states.shape)
    if len(shape) == 5 and target == (shape[0], shape[1] * shape[2], shape[3], shape[4]):
        return states.view_as_repeated(target, states.num_repeats)
    return None


def _lazy_contiguous(states: LazyStates) -> LazyStates:
    return states


def _lazy_to(states: LazyStates, *args: Any, **kwargs: Any) -> LazyStates | None:
    unchanged = not kwargs and len(args) == 1 and args[0] in (states.dtype, states.device)
    return states if unchanged else None


_LAZY_FUNCTIONS: dict[Callable[..., Any], Callable[..., LazyStates | None]] = {
    torch.Tensor.__getitem__: _lazy_getitem,
    torch.Tensor.expand: _lazy_expand,
    torch.Tensor.reshape: _lazy_reshape,
    torch.Tensor.contiguous: _lazy_contiguous,
    torch.Tensor.to: _lazy_to,
}
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
