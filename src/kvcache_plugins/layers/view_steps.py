"""Which operations leave every token by itself, and what they do to a tile of tokens instead of all of them.

A step's function takes a tensor of any number of tokens in the dimension where they are. What would mix tokens, pick
some of them or move them into a dimension with something else is no step.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F


TensorFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class TokenStep:
    """
    Attributes:
        function (`Callable`): what is done to a tile.
        token_dim (`int`): the dimension that tokens are in then.
        shape (`tuple[int, ...]`, *optional*): of all tokens, where it cannot be told from a tensor without data.
        only_moves (`bool`): whether it moves and repeats numbers, and changes none but by a cast.
    """

    function: TensorFunction
    token_dim: int
    shape: tuple[int, ...] | None = None
    only_moves: bool = True


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """Shape and dtype of states before a step, and the dimension that tokens are in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    token_dim: int

    @property
    def num_tokens(self) -> int:
        return self.shape[self.token_dim]

    def dim(self, dim: int) -> int:
        """A dimension counted from the front."""
        return dim % len(self.shape)


Steps = TokenStep | list[TokenStep] | None
Handler = Callable[..., Steps]


def find_steps(function: Callable[..., Any], layout: Layout, args: Sequence[Any], kwargs: dict[str, Any]) -> Steps:
    """
    What an operation on states of a layout does to a tile of them.

    Args:
        function (`Callable`): as `__torch_function__` is given it.
        layout (`Layout`): of the states, its first argument.
        args, kwargs: its other arguments.

    Returns:
        `TokenStep`, or a list of them for an operation that returns several tensors; `None` if it is no step.
    """
    handler = _HANDLERS.get(function)
    return None if handler is None else handler(layout, *args, **kwargs)


def _sizes(sizes: tuple[Any, ...]) -> list[int]:
    """Sizes that were given one by one or together."""
    return list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)


def _transpose(layout: Layout, dim0: int, dim1: int) -> Steps:
    first, second = layout.dim(dim0), layout.dim(dim1)
    token_dim = {first: second, second: first}.get(layout.token_dim, layout.token_dim)
    return TokenStep(lambda states: states.transpose(first, second), token_dim)


def _permute(layout: Layout, *dims: Any) -> Steps:
    order = [layout.dim(dim) for dim in _sizes(dims)]
    return TokenStep(lambda states: states.permute(order), order.index(layout.token_dim))


def _matrix_transpose(layout: Layout, *given: Any) -> Steps:
    return _transpose(layout, -1, -2)


def _reshape(layout: Layout, *sizes: Any) -> Steps:
    target = _sizes(sizes)
    if any(not isinstance(size, int) for size in target):
        return None
    if -1 in target:
        known = math.prod(size for size in target if size != -1)
        target[target.index(-1)] = math.prod(layout.shape) // max(known, 1)
    before = math.prod(layout.shape[: layout.token_dim])
    for dim, size in enumerate(target):
        # A single token cannot be told from other dimensions of size 1
        if size == layout.num_tokens != 1 and math.prod(target[:dim]) == before:
            return TokenStep(partial(torch.reshape, shape=(*target[:dim], -1, *target[dim + 1 :])), dim)
    return None


def _flatten(layout: Layout, start_dim: int = 0, end_dim: int = -1) -> Steps:
    start, end = layout.dim(start_dim), layout.dim(end_dim)
    merged = math.prod(layout.shape[start : end + 1])
    return _reshape(layout, *layout.shape[:start], merged, *layout.shape[end + 1 :])


def _unflatten(layout: Layout, dim: int, sizes: Sequence[int]) -> Steps:
    place = layout.dim(dim)
    return _reshape(layout, *layout.shape[:place], *sizes, *layout.shape[place + 1 :])


def _expand(layout: Layout, *sizes: Any) -> Steps:
    target = _sizes(sizes)
    token_dim = len(target) - len(layout.shape) + layout.token_dim
    if token_dim < 0 or target[token_dim] not in (-1, layout.num_tokens):
        return None
    target[token_dim] = -1
    return TokenStep(lambda states: states.expand(target), token_dim)


def _repeat(layout: Layout, *repeats: Any) -> Steps:
    counts = _sizes(repeats)
    token_dim = len(counts) - len(layout.shape) + layout.token_dim
    if token_dim < 0 or counts[token_dim] != 1:
        return None
    return TokenStep(lambda states: states.repeat(counts), token_dim)


def _repeat_interleave(layout: Layout, repeats: Any, dim: int | None = None, **options: Any) -> Steps:
    if dim is None or not isinstance(repeats, int) or options or layout.dim(dim) == layout.token_dim:
        return None
    return TokenStep(lambda states: states.repeat_interleave(repeats, dim=dim), layout.token_dim)


def _unsqueeze(layout: Layout, dim: int) -> Steps:
    place = dim % (len(layout.shape) + 1)
    return TokenStep(lambda states: states.unsqueeze(place), layout.token_dim + (place <= layout.token_dim))


def _squeeze(layout: Layout, dim: int | None = None) -> Steps:
    if dim is None or layout.dim(dim) == layout.token_dim:
        return None
    place = layout.dim(dim)
    is_gone = layout.shape[place] == 1 and place < layout.token_dim
    return TokenStep(lambda states: states.squeeze(place), layout.token_dim - is_gone)


def _getitem(layout: Layout, index: Any) -> Steps:
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is not None and item is not Ellipsis and not isinstance(item, (slice, int)) for item in items):
        return None
    num_taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    place = items.index(Ellipsis)
    items[place : place + 1] = [slice(None)] * (len(layout.shape) - num_taken)
    source_dim = new_dim = 0
    token_dim: int | None = None
    for number, item in enumerate(items):
        if item is not None and source_dim == layout.token_dim:
            if not isinstance(item, slice) or item.indices(layout.num_tokens) != (0, layout.num_tokens, 1):
                return None
            items[number], token_dim = slice(None), new_dim
        source_dim += item is not None
        new_dim += not isinstance(item, int)
    assert token_dim is not None
    tile_index = tuple(items)
    return TokenStep(lambda states: states[tile_index], token_dim)


def _split(layout: Layout, sizes: Any, dim: int = 0) -> Steps:
    if layout.dim(dim) == layout.token_dim:
        return None
    whole = layout.shape[layout.dim(dim)]
    lengths = [min(sizes, whole - start) for start in range(0, whole, sizes)] if isinstance(sizes, int) else sizes
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [
        TokenStep(partial(torch.narrow, dim=dim, start=start, length=length), layout.token_dim)
        for start, length in zip(starts, lengths, strict=True)
    ]


def _chunk(layout: Layout, chunks: int, dim: int = 0) -> Steps:
    return _split(layout, -(-layout.shape[layout.dim(dim)] // chunks), dim)


def _unchanged(layout: Layout, *args: Any, **kwargs: Any) -> Steps:
    return TokenStep(lambda states: states, layout.token_dim)


def _to(layout: Layout, *args: Any, **kwargs: Any) -> Steps:
    given = torch.empty(0, dtype=layout.dtype, device=layout.device)
    wanted = given.to(*args, **kwargs)
    if wanted.device != layout.device:
        return None
    return _cast(layout, wanted.dtype)


def _cast(layout: Layout, dtype: torch.dtype) -> Steps:
    return TokenStep(lambda states: states.to(dtype), layout.token_dim)


def _float(layout: Layout) -> Steps:
    return _cast(layout, torch.float32)


def _linear(layout: Layout, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Steps:
    if layout.token_dim == len(layout.shape) - 1:
        return None
    shape = *layout.shape[:-1], weight.shape[0]
    return TokenStep(lambda states: F.linear(states, weight, bias), layout.token_dim, shape, only_moves=False)


def _elementwise(function: Callable[..., torch.Tensor]) -> Handler:
    """Of states and a number, or a tensor that is the same for all tokens."""

    def handler(layout: Layout, other: Any) -> Steps:
        if isinstance(other, torch.Tensor):
            place = layout.token_dim - len(layout.shape) + other.dim()
            if other.dim() > len(layout.shape) or (place >= 0 and other.shape[place] != 1):
                return None
            shape = tuple(torch.broadcast_shapes(layout.shape, other.shape))
            return TokenStep(lambda states: function(states, other), layout.token_dim, shape, only_moves=False)
        return TokenStep(lambda states: function(states, other), layout.token_dim, only_moves=False)

    return handler


_BY_NAME: dict[str, Handler] = {
    "transpose": _transpose,
    "swapaxes": _transpose,
    "swapdims": _transpose,
    "permute": _permute,
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "expand": _expand,
    "broadcast_to": _expand,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "__getitem__": _getitem,
    "split": _split,
    "chunk": _chunk,
    "contiguous": _unchanged,
    "detach": _unchanged,
    "to": _to,
    "float": _float,
    "linear": _linear,
    "mul": _elementwise(operator.mul),
    "__mul__": _elementwise(operator.mul),
    "__rmul__": _elementwise(operator.mul),
    "div": _elementwise(operator.truediv),
    "__truediv__": _elementwise(operator.truediv),
}
_HANDLERS: dict[Callable[..., Any], Handler] = {
    getattr(place, name): handler
    for name, handler in _BY_NAME.items()
    for place in (torch.Tensor, torch, F)
    if hasattr(place, name)
}
_HANDLERS[torch.Tensor.mT.__get__] = _matrix_transpose  # type: ignore[attr-defined]
