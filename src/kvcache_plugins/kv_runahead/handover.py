"""How a prompt gets into the user's cache, layer by layer, while the forward still runs.

On the last rank the chain's layers stand in the user's own cache. As soon as a layer has attended, the user's layer
gets the prompt, compresses or stores it as it would its own, and takes its place again: no more than one layer's
prompt is ever held dense beside it (two, where attention does not tell when it is done).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kvcache_plugins.layers.prompt_layer import PromptLayer

from .prompt_slice import PromptSlice


# Hands out a layer's keys and values, and lets go of them
TakeStates = Callable[[], tuple[torch.Tensor, torch.Tensor] | None]


class Handover:
    """
    The cache of a forward, and what becomes of a layer's states when it has attended.

    Args:
        prompt_slice (`PromptSlice`): what the rank prefills.
        cache (`Cache`, *optional*): the user's empty cache, on the last rank; the others let go of their states.
    """

    def __init__(self, prompt_slice: PromptSlice, cache: Cache | None):
        self._slice, self._cache = prompt_slice, cache
        # The user's own layers while others stand in their place
        self._own: list[Any] = []
        # The layer whose attention may still be under way
        self._unfinished: tuple[int, TakeStates] | None = None

    def replace_layers(self, layers: Sequence[CacheLayerMixin]) -> Cache:
        """The cache for the forward, in which `layers` stand."""
        if self._cache is None:
            return Cache(layers=list(layers))
        self._own = list(self._cache.layers)
        while len(self._own) < len(layers):
            # Caches made without a config add layers as they are asked for
            make_layer: Any = self._cache.layer_class_to_replicate
            self._own.append(make_layer())
        self._cache.layers[:] = layers
        return self._cache

    def put_back(self, *, complete: bool) -> None:
        """The user's layers into their places, emptied if something went wrong: half filled may not look complete."""
        if self._cache is not None:
            self._cache.layers[:] = self._own
        if not complete:
            for layer in self._own:
                layer.reset()

    def own_layer(self, layer_idx: int) -> Any:
        """The user's layer, which has the prompt when this returns; `None` on ranks before the last."""
        self.finish_layer()
        return None if self._cache is None else self._own[layer_idx]

    def begin(self, layer_idx: int, take_states: TakeStates) -> None:
        """Attention of a layer is about to begin."""
        self.finish_layer()
        self._unfinished = layer_idx, take_states

    def finish_layer(self) -> None:
        """Lets go of the states of the layer that began last: into the user's cache on the last rank."""
        if self._unfinished is None:
            return
        (layer_idx, take_states), self._unfinished = self._unfinished, None
        states = take_states()
        if self._cache is None or states is None:
            return
        keys, values = states
        own = self._own[layer_idx]
        if isinstance(own, PromptLayer) and own.is_sliding and keys.shape[2] < self._slice.stop:
            # Where tokens stand in the sequence is not known of a window alone: it stays exact
            own = self._own[layer_idx] = DynamicSlidingWindowLayer(own.get_max_length())
        if isinstance(own, PromptLayer):
            padding = self._slice.padding_for(keys.shape[0])
            own.take_prompt(keys, values, None if padding is None else torch.tensor(padding, device=keys.device))
        else:
            own.update(keys, values)
            if isinstance(own, DynamicSlidingWindowLayer):
                # It was shown its window alone
                own.cumulative_length = self._slice.stop
            if self._cache.offloading:
                own.offload()
        self._cache.layers[layer_idx] = own
