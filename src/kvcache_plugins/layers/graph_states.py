"""A decode step as one graph: how a cache's layers stand in what `torch.compile` traces.

A cache decides by numbers what it does with a token, which no graph can hold. So in a graph a layer is one operator,
`torch.ops.kvcache_plugins.cached_attention`: it gives the new keys and values to the cache, as `update` would, and
attends to what that returns. To the graph it is opaque, so nothing breaks it, and no length is compiled into it.

`update` is called before the query is known. In a graph it returns `GraphStates`, which know the new states and their
cache, and become the operator where attention gets them. They are tensors for the sake of models that repeat heads on
the way; nothing else can be done with them.

CUDA graphs must not replay the operator without the host: it is tagged so, and PyTorch captures what is around it.
"""

import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F


class UpdatedCache(Protocol):
    """A cache of a model's layers."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states of a layer and returns all."""


# An operator is given tensors and numbers: caches by a number, as long as they are in use
_CACHES: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = itertools.count(1)
_REPEATING = (torch.Tensor.__getitem__, torch.Tensor.expand, torch.Tensor.reshape)


def register(cache: UpdatedCache) -> torch.Tensor:
    """The number of a cache, as the operator is given it: in a tensor, which no graph is specialized for."""
    number = next(_NUMBERS)
    _CACHES[number] = cache
    # Made in inference mode it could not be used outside
    with torch.inference_mode(False):
        return torch.tensor([number])


class GraphStates(torch.Tensor):
    """
    What `update` returns while a step is traced.

    Attributes:
        states (`torch.Tensor` of shape `[batch_size, num_heads, 1, head_dim]`): the new keys or values.
        number (`torch.Tensor`): the cache's.
        layer_idx (`int`): the layer's.
    """

    states: torch.Tensor
    number: torch.Tensor
    layer_idx: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return result
        if func not in _REPEATING:
            raise NotImplementedError(
                "`compile_whole_steps` is for models whose attention is `sdpa`: this one computes with what the cache "
                "returned"
            )
        return stand_for(args[0].states, args[0].number, args[0].layer_idx, result)


def stand_for(
    new: torch.Tensor, number: torch.Tensor, layer_idx: int, shown: torch.Tensor | None = None
) -> GraphStates:
    """New states in the place of all of a layer's, which look like `shown`."""
    states = (new if shown is None else shown).as_subclass(GraphStates)
    states.states, states.number, states.layer_idx = new, number, layer_idx
    return states


def _attend(
    query: torch.Tensor,
    key: GraphStates,
    value: GraphStates,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return cached_attention(query, key.states, value.states, attn_mask, key.number, key.layer_idx, scale)


@torch.library.custom_op(
    "kvcache_plugins::cached_attention", mutates_args=("number",), tags=(torch.Tag.cudagraph_unsafe,)
)
def cached_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    number: torch.Tensor,
    layer_idx: int,
    scale: float | None,
) -> torch.Tensor:
    """
    Stores new states in a layer of a cache, and attends to all that it holds.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, 1, D]`): queries.
        keys, values (`torch.Tensor` of shape `[B, H, 1, D]`): the new states.
        mask (`torch.Tensor`, *optional*): as `scaled_dot_product_attention` takes it.
        number (`torch.Tensor`): of the cache. It is said to be written to, so that calls keep their order.
        layer_idx (`int`): which layer.
        scale (`float`, *optional*): factor of the scores.

    Returns:
        `torch.Tensor` of shape `[B, H * G, 1, value head dim]`.
    """
    cache = _CACHES.get(int(number))
    if cache is None:
        raise RuntimeError("the cache of this graph is gone, or a copy: call its `compile_whole_steps()` first")
    # Operators are called with lazy states switched off
    with torch.no_grad(), torch._C._EnableTorchFunction():
        all_keys, all_values = cache.update(keys, values, layer_idx)
        return F.scaled_dot_product_attention(
            query, all_keys, all_values, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
        ).contiguous()


@cached_attention.register_fake
def _fake(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    number: torch.Tensor,
    layer_idx: int,
    scale: float | None,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], values.shape[3])
