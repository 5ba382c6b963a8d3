"""Layers whose attention runs beside a convolution or a recurrence, as in Falcon-H1: the states of these are small, do
not grow, and stay exact, as Transformers' own code keeps them; keys and values are a method's."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from .lazy_states import LazyLayer


def with_recurrent_states(layer: LazyLayer, number_of_states: int) -> LazyLayer:
    """
    A new layer that keeps states of convolutions and recurrences too.

    Args:
        layer (`LazyLayer`): for keys and values. It has not been used yet, and is what is returned.
        number_of_states (`int`): how many of each kind.
    """
    layer.__class__ = _hybrid_class(type(layer))
    LinearAttentionLayer.__init__(layer, number_of_states=number_of_states)  # type: ignore[arg-type]
    return layer


class RecurrentStates(LinearAttentionLayer):
    """Stands before the class of a `LazyLayer`, whose operations on a batch then take these states along."""

    is_compileable = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if len(args) == 2:
            super(LinearAttentionCacheLayerMixin, self).lazy_initialization(*args)  # type: ignore[misc]
        else:
            super().lazy_initialization(**kwargs)

    def _recurrent_tensors(self) -> Iterator[tuple[dict[int, Any], int, torch.Tensor]]:
        for states in (self.conv_states, self.recurrent_states):
            yield from ((states, index, tensor) for index, tensor in states.items() if tensor is not None)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `LazyLayer.map_tensors`."""
        super().map_tensors(function)  # type: ignore[misc]
        for states, index, tensor in list(self._recurrent_tensors()):
            states[index] = function(tensor)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `LazyLayer.named_tensors`."""
        yield from super().named_tensors()  # type: ignore[misc]
        yield from (("recurrent", tensor) for _, _, tensor in self._recurrent_tensors())

    def reset(self) -> None:
        super().reset()
        super(LinearAttentionCacheLayerMixin, self).reset()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        super(LinearAttentionCacheLayerMixin, self).crop(tokens_to_remove)  # type: ignore[misc]

    # What moves or reorders goes by `map_tensors`
    def offload(self) -> None:
        super(LinearAttentionCacheLayerMixin, self).offload()  # type: ignore[misc]

    def prefetch(self) -> None:
        super(LinearAttentionCacheLayerMixin, self).prefetch()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super(LinearAttentionCacheLayerMixin, self).reorder_cache(beam_idx)  # type: ignore[misc]


class HybridLayersMixin(Cache):
    """Mixed into a cache of such layers, before `Cache`."""

    @property
    def is_linear(self) -> list[bool]:
        """As `Cache.is_linear`: layers that have attention beside a recurrence are none of those without."""
        # Not by `super()`: `torch.compile` knows no properties of bases
        return [
            isinstance(layer, LinearAttentionLayer) and not isinstance(layer, CacheLayerMixin) for layer in self.layers
        ]


@cache
def _hybrid_class(base: type[LazyLayer]) -> type[LazyLayer]:
    return type(f"Hybrid{base.__name__}", (RecurrentStates, base), {})
