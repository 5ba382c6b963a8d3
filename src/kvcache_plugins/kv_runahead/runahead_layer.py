"""Layers of one rank during the forward over its slice of the prompt.

A layer exchanges its states with the neighbours. Under `sdpa` it reports the length of its own slice to code that
makes masks, and returns lazy states of that length, so that no mask of slice x prefix is made. Any other
implementation gets the prefix and the slice dense.

On the last rank these layers replace those of the user's cache. Once a layer has attended, the user's layer gets the
prompt and returns to the cache, so that the prompt of only one layer is held dense beside the cache (of two, if
attention does not report that it is done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.lazy_kv import make_lazy_kv
from kvcache_plugins.layers.lazy_layer import LazyLayer

from .attention import attend_behind_prefix
from .prefix_exchange import PrefixExchange
from .transport import RunaheadError


class RunaheadLayer(LazyLayer):
    """
    Keys and values of one layer on one rank.

    Args:
        prefill (`SlicePrefill`): the rank's prefill.
        layer_idx (`int`): index of the layer.
        window (`int`, *optional*): its sliding window.
        is_lazy (`bool`): True if attention is by `sdpa`.
    """

    is_croppable = False

    def __init__(self, prefill: SlicePrefill, layer_idx: int, window: int | None, *, is_lazy: bool) -> None:
        super().__init__(layer_idx)
        self._prefill = prefill
        self._slice = prefill.exchange.prompt_slice
        self._is_lazy = is_lazy
        self.sliding_window = window
        self.is_sliding = window is not None
        # Keys and values of prefix and slice, or as much of them as a window sees
        self.states: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = self._slice.start

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange the slice's states, and return all; a `ValueError` for other tokens than the slice."""
        part = self._slice
        if self._length == part.stop:
            # Attention did not report that it was done, and `generate` has continued
            self._prefill.finish_layer()
            if self._prefill.own_layers:
                own = self._prefill.own_layers[self.layer_idx]
                keys, values = own.update(key_states, value_states, *args, **kwargs)
                return keys, values
        if self._length != part.start or key_states.shape[2] != part.num_tokens:
            rank = self._prefill.exchange.neighbours.rank
            raise ValueError(
                f"rank {rank} prefills the tokens {part.start} to {part.stop} in one forward, but its layer "
                f"{self.layer_idx} got {key_states.shape[2]} tokens at position {self._length}. "
                "`prefill_chunk_size`, and drafts, cannot be combined with it"
            )
        self.lazy_initialization(key_states, value_states)
        self._prefill.finish_layer()
        self._prefill.unfinished = self.layer_idx
        self.states = self._prefill.exchange.exchange(self.layer_idx, key_states, value_states)
        self._length = part.stop
        if not self._is_lazy:
            return self.states
        return make_lazy_kv(self, key_states.shape, value_states.shape, part.num_tokens, self.dtype, self.device)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend with the slice to prefix and slice, and finish the layer."""
        assert self.states is not None
        query, part = call.query, self._slice
        keys, values = self.states
        if call.mask is not None and call.mask.dtype != torch.bool:
            raise ValueError(
                "`model`: attention adds a bias to its scores, which is not known for the tokens of other ranks; "
                "`model.set_attn_implementation('eager')` takes the exact way"
            )
        # Queries of a single token may have the heads of a group as tokens
        rows = query.reshape(query.shape[0], -1, part.num_tokens, query.shape[3])
        # A window may begin within the padding, or behind it
        padding = part.padding_for(query.shape[0], part.stop - keys.shape[2])
        window = self.sliding_window
        output = attend_behind_prefix(rows, keys, values, scale=call.scale, padding=padding, window=window)
        self._prefill.finish_layer()
        return output.reshape(*query.shape[:3], -1)

    def lazy_length(self) -> int:
        return self._slice.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length, self._length) if self._is_lazy else super().get_mask_sizes(query_length)

    def to_dense(self, side: str) -> torch.Tensor:
        # Dense attention would have a mask of the slice alone
        raise ValueError(
            "`model`: its attention does not go through `scaled_dot_product_attention`, though its implementation is "
            "called `sdpa`; `model.set_attn_implementation('eager')` takes the exact way"
        )

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        assert self.states is not None
        batch_size, num_heads, length, head_dim = self.states[side == "values"].shape
        return batch_size, num_heads, length, head_dim

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.states is not None:
            self.states = function(self.states[0]), function(self.states[1])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for states in self.states or ():
            yield "prefix", states

    def stats(self) -> dict[str, int]:
        return {"tokens_cached": self._length}

    def crop_tokens(self, count: int) -> None:
        raise ValueError("`tokens_to_remove`: the prompt is being prefilled; crop what `runahead_prefill` returns")

    def offload(self) -> None:
        """Do nothing: attention needs the states next."""

    prefetch = offload

    def reset(self) -> None:
        self.states = None
        self._length = self._slice.start
        self.is_initialized = False


class SlicePrefill:
    """
    Prefill of a rank's slice in one forward. The last rank fills the user's `cache`, the others drop their states.

    Args:
        exchange (`PrefixExchange`): exchange with the neighbours.
        is_lazy (`bool`): True if attention is by `sdpa`.
        cache (`Cache`, *optional*): empty cache of the user, on the last rank.
    """

    layer_class = RunaheadLayer

    def __init__(self, exchange: PrefixExchange, *, is_lazy: bool, cache: Cache | None) -> None:
        self.exchange = exchange
        self._given = cache
        self._layers = [
            self.layer_class(self, index, layout.window, is_lazy=is_lazy)
            for index, layout in enumerate(exchange.layouts)
        ]
        self.cache = Cache(layers=list(self._layers)) if cache is None else cache
        # Layers of the user's cache while they are replaced
        self.own_layers: list[CacheLayerMixin] = []
        # Layer whose attention may still be running
        self.unfinished: int | None = None

    @contextmanager
    def running(self) -> Iterator[Cache]:
        """Put the rank's layers into the cache, and at the end the user's back, which are emptied after an error."""
        if self._given is not None:
            self.own_layers = _all_layers(self._given, len(self._layers))
            self._given.layers[:] = self._layers
        try:
            self.exchange.post_receives()
            yield self.cache
            self.finish_layer()
            self.exchange.neighbours.flush()
        except BaseException as error:
            # A half-filled cache must not look complete
            for layer in self.own_layers:
                layer.reset()
            self.exchange.neighbours.failures.add(error)
            if not isinstance(error, Exception) or isinstance(error, (RunaheadError, ValueError)):
                raise
            raise RunaheadError(f"rank {self.exchange.neighbours.rank}: {type(error).__name__}: {error}") from error
        finally:
            if self._given is not None:
                self._given.layers[:] = self.own_layers

    def finish_layer(self) -> None:
        """Drop the states of the layer that attended last; on the last rank the user's layer takes them."""
        if self.unfinished is None:
            return
        layer_idx = self.unfinished
        states = self._layers[layer_idx].states
        self.unfinished = None
        self._layers[layer_idx].states = None
        if self._given is not None and states is not None:
            self.own_layers[layer_idx] = self._fill(self.own_layers[layer_idx], *states)
            self._given.layers[layer_idx] = self.own_layers[layer_idx]

    def _fill(self, own: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor) -> CacheLayerMixin:
        """Fill a layer of the user's cache with the prompt, and return it, or an exact layer instead."""
        assert self._given is not None
        length = self.exchange.prompt_slice.stop
        if isinstance(own, LazyLayer) and own.is_sliding and keys.shape[2] < length:
            # A compressed layer would need all tokens to know their positions: the window stays exact
            own = DynamicSlidingWindowLayer(own.get_max_length())
        if isinstance(own, LazyLayer):
            padding = self.exchange.prompt_slice.padding_for(keys.shape[0])
            counts = None if padding is None else torch.tensor(padding, dtype=torch.int64, device=keys.device)
            own.load_prompt(keys, values, counts)
            return own
        own.update(keys, values)
        if isinstance(own, DynamicSlidingWindowLayer):
            # Only the tokens of its window have come
            own.cumulative_length = length
        if self._given.offloading:
            own.offload()
        return own


def _all_layers(cache: Cache, num_layers: int) -> list[CacheLayerMixin]:
    """Return the layers of a cache; one made without a config adds layers as they are needed."""
    layers = list(cache.layers)
    if cache.layer_class_to_replicate is not None:
        layers += [cache.layer_class_to_replicate() for _ in range(num_layers - len(layers))]
    known = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
    assert len(known) == len(layers), "models with other layers have no `MessageLayout`"
    return known
