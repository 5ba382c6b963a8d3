"""Layers of a model's config, in a cache that is told of no model when it is used.

A method may replace layers of full attention, and of those with a window what it can take; other bounded ones stay
Transformers' own. Of layers whose attention runs beside a convolution or a recurrence, as in Falcon-H1, the states of
these are small, do not grow, and stay exact, as Transformers' own code keeps them; keys and values are a method's.

Only states arrive, layer by layer. What they tell is checked before they are stored: how many layers there are, their
key/value heads, and that all layers hold as many tokens. Where that shows in a later layer only, those before it give
up the tokens of this forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from kvcache_plugins.models.layer_config import configs_of_layers, decoder_config
from kvcache_plugins.user_warnings import warn_user

from .lazy_layer import ANOTHER_PROMPT, LazyLayer
from .static_layer import StaticLayer, traced_states


# No layer, and no tokens
_NONE = -1, -1
# The error of a cache that an encoder's states are added to
ENCODER_STATES = (
    "`past_key_values` is a cache for the decoder's own tokens, and the encoder's would be stored among them: pass "
    "`EncoderDecoderCache(cache, DynamicCache())`"
)
# Layer types whose state is bounded or empty: Transformers' own layers keep them
_BOUNDED_LAYER_TYPES = {
    *("sliding_attention", "chunked_attention", "reference_sliding_attention", "hybrid_sliding"),
    *("linear_attention", "conv", "mamba", "moe", "mlp", "dummy"),
}
# Full attention, alone or with what stays exact beside it: the keys of an indexer, states of a recurrence
_FULL_LAYER_TYPES = {"full_attention", "indexed_attention", "minimax_m3_sparse", "hybrid"}
# Not in all releases of Transformers
_HYBRID_LAYERS: set[type | None] = {
    getattr(cache_utils, f"LinearAttentionAnd{kind}AttentionLayer", None) for kind in ("Full", "SlidingWindow")
}


def replace_full_attention(
    config: PreTrainedConfig,
    make_layer: Callable[[int], CacheLayerMixin],
    make_windowed: Callable[[int, int], CacheLayerMixin | None] = lambda index, window: None,
) -> list[Any]:
    """
    Makes Transformers' own cache layers for the config of a decoder, with those of full attention replaced by index; a
    `ValueError` if it has layers that hold full-length states of another kind, or none that hold any.

    Args:
        make_windowed (`Callable`, *optional*): Makes the layer of an index whose attention has a window, of so many
            tokens; `None`, as by default, leaves Transformers' own in its place.
    """
    own: list[Any] = list(DynamicCache(config=config).layers)
    layer_types = getattr(config, "layer_types", None) or []
    foreign = sorted(set(layer_types) - _BOUNDED_LAYER_TYPES - _FULL_LAYER_TYPES)
    if foreign:
        raise ValueError(
            f"`config`: layers of type {', '.join(f'`{each}`' for each in foreign)} keep states in a form of their "
            "own, which only Transformers' own cache has: use `DynamicCache(config=config)`"
        )
    if any(type(layer) in _HYBRID_LAYERS and not hasattr(layer, "number_of_states") for layer in own):
        raise ValueError(
            "`config`: layers with attention beside a recurrence are supported with later releases of Transformers: "
            f"{transformers.__version__} keeps the recurrence's states in another form"
        )
    made: dict[int, CacheLayerMixin] = {}
    for index, layer in enumerate(own):
        if isinstance(layer, DynamicSlidingWindowLayer):
            windowed = make_windowed(index, layer.sliding_window)
            made |= {} if windowed is None else {index: windowed}
        elif isinstance(layer, DynamicLayer):
            made[index] = make_layer(index)
    if not made:
        windows = sorted({layer.sliding_window for layer in own if isinstance(layer, DynamicSlidingWindowLayer)})
        if not windows:
            raise ValueError(
                "`config`: none of the model's layers has attention that keeps keys and values: there is nothing that "
                "the method could be applied to"
            )
        warn_user(
            f"`config`: all layers of the model attend to a window of {', '.join(map(str, windows))} tokens, and stay "
            "Transformers' own: nothing is compressed or dropped"
        )
    for index, layer in made.items():
        if type(own[index]) in _HYBRID_LAYERS and isinstance(layer, LazyLayer):
            # Not used yet, it keeps states of convolutions and recurrences too
            layer.__class__ = _hybrid_class(type(layer))
            LinearAttentionLayer.__init__(layer, number_of_states=own[index].number_of_states)  # type: ignore[arg-type]
        # What a cache leaves as it is keeps what belongs to it
        own[index] = own[index] if type(layer) is DynamicLayer else layer
    return own


def holds_nothing(layer: object) -> bool:
    """Tells whether a layer never holds anything, as it has no attention, or attends to what another one holds."""
    return type(layer) is getattr(cache_utils, "DummyLayer", None)


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
    """Makes a class of layers whose operations on a batch take states of convolutions and recurrences along."""

    class Hybrid(LinearAttentionLayer, base):  # type: ignore[misc, valid-type]
        is_compileable = False
        # What moves or reorders goes by `map_tensors`
        offload, prefetch, reorder_cache = base.offload, base.prefetch, base.reorder_cache

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            if len(args) == 2:
                base.lazy_initialization(self, *args)
            else:
                super().lazy_initialization(**kwargs)

        def _recurrent_tensors(self) -> Iterator[tuple[dict[int, Any], int, torch.Tensor]]:
            for states in (self.conv_states, self.recurrent_states):
                yield from ((states, index, tensor) for index, tensor in states.items() if tensor is not None)

        def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            base.map_tensors(self, function)
            for states, index, tensor in list(self._recurrent_tensors()):
                states[index] = function(tensor)

        def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from base.named_tensors(self)
            yield from (("recurrent", tensor) for _, _, tensor in self._recurrent_tensors())

        def reset(self) -> None:
            super().reset()
            base.reset(self)

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            base.crop(self, tokens_to_remove)

    Hybrid.__name__ = Hybrid.__qualname__ = f"Hybrid{base.__name__}"
    return Hybrid


def watches_order(config: PreTrainedConfig | None, num_layers: int) -> bool:
    """
    Tells whether a cache of so many layers gets an encoder's states too where a layer is updated twice in a row. Of a
    model with one layer nothing can be told, and no decoder alone is watched.
    """
    return config is not None and config.is_encoder_decoder and num_layers > 1


class ModelMatchMixin(HybridLayersMixin):
    """Mixed into a cache of `LazyLayer`s, before `Cache`."""

    # Numbers of key/value heads that the config names, if any
    expected_heads: frozenset[int] = frozenset()
    _is_watched = False
    # Of the forward under way: what each layer held before it, and got
    _given: dict[int, tuple[int, int]] | None = None
    # The newest of them: which layer, and what it held
    _newest = _NONE
    _is_direct = False

    def _init_layers(self, config: PreTrainedConfig | None) -> None:
        """Makes all layers of a model of the config, or without one each layer when the model comes to it."""
        self.layers: list[Any] = []
        if config is None:
            super().__init__(layer_class_to_replicate=self._next_layer)  # type: ignore[arg-type]
        else:
            config = decoder_config(config)
            self.expected_heads = key_value_heads(config)
            super().__init__(layers=self._layers_for(config))
        self._is_watched = watches_order(config, len(self.layers))

    def _layers_for(self, config: PreTrainedConfig) -> list[Any]:
        return replace_full_attention(config, self._layer)

    def _layer(self, layer_idx: int) -> Any:
        """A new layer that holds tokens in this cache's way."""
        raise NotImplementedError

    def _next_layer(self) -> Any:
        return self._layer(len(self.layers))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`; a `ValueError` if the states are another model's, before they are stored."""
        if torch.compiler.is_dynamo_compiling():
            layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
            if isinstance(layer, StaticLayer) and layer.form is not None and key_states.shape[2] == 1:
                return traced_states(layer, key_states, value_states)
            return self._update_outside_of_graphs(key_states, value_states, layer_idx, *args, **kwargs)
        if self._is_watched and layer_idx == self._newest[0]:
            self._take_back()
            raise ValueError(ENCODER_STATES)
        given = self._given
        # In order of the layers, as long as it is one forward
        if given is None or layer_idx <= self._newest[0]:
            given = self._begin_forward(layer_idx)
        num_heads, count = key_states.shape[1:3]
        # `None` of one that is Transformers' own
        held = getattr(self.layers[layer_idx], "_length", None) if layer_idx < len(self.layers) else 0
        # Of a layer like the one before there is no more to be said
        is_known = not self.expected_heads or num_heads in self.expected_heads
        if held != self._newest[1] or not is_known or layer_idx >= len(self.layers):
            try:
                self._check_states(num_heads, layer_idx, held)
            except ValueError:
                self._take_back()
                raise
        states: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        if held is not None:
            given[layer_idx] = held, count
            self._newest = layer_idx, held
        return states

    # Nothing that `torch.compile` could trace
    _update_outside_of_graphs = torch.compiler.disable(update)

    def _begin_forward(self, layer_idx: int) -> dict[int, tuple[int, int]]:
        """Looks at the last forward, as another one begins with a layer; the layers of this one have nothing yet."""
        # One layer again and again is no forward of a model: somebody fills layer after layer
        self._is_direct = self._is_direct or list(self._given or ()) == [layer_idx]
        if not self._is_direct:
            self._check_last_forward()
        self._given, self._newest = {}, _NONE
        return self._given

    # As those of `Cache`; a `ValueError` if the cache knows of no such layers

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        self._check_knows_layers(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_knows_layers(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._check_knows_layers(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As `Cache.update_indexer`, before `update` of the same layer."""
        while self.layer_class_to_replicate is not None and len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())
        states: torch.Tensor = super().update_indexer(indexer_key_states, layer_idx)
        return states

    def _check_knows_layers(self, layer_idx: int) -> None:
        if self.layer_class_to_replicate is not None:
            name = type(self).__name__
            raise ValueError(
                f"layer {layer_idx} of the model keeps states of a convolution or recurrence, which a cache has to be "
                f"told of when it is made: write `{name}(model.config)` instead of `{name}()`"
            )

    def reset(self) -> None:
        super().reset()
        self._given, self._newest, self._is_direct = None, _NONE, False

    def _check_last_forward(self) -> None:
        # A model that they are too many for leaves the last ones empty
        if not self._given:
            return
        last = max(self._given)
        ours = (layer.get_seq_length() if isinstance(layer, LazyLayer) else None for layer in self.layers[last:])
        if next(ours) and 0 in ours:
            raise ValueError(
                f"the cache was made for a model of {len(self.layers)} layers, but the last forward had states for "
                f"{last + 1} of them: it was another model's, or broke off; make {ANOTHER_PROMPT}"
            )

    def _check_states(self, num_heads: int, layer_idx: int, length: int | None) -> None:
        if self.layers and layer_idx >= len(self.layers) and self.layer_class_to_replicate is None:
            raise ValueError(
                f"the cache was made for a model of {len(self.layers)} layers, but the one that it is used with has "
                f"more: make one with `{type(self).__name__}(model)` for each model"
            )
        if self._given and not self._is_direct and length is not None:
            other, (held, _) = next(reversed(self._given.items()))
            if length != held:
                raise ValueError(
                    f"layer {layer_idx} holds {length} tokens, but layer {other} {held}: what the cache holds is of "
                    f"another model, or of a forward that broke off; make {ANOTHER_PROMPT}"
                )
        if not self.expected_heads or num_heads in self.expected_heads:
            return
        # Ranks of tensor parallelism have a part of the heads each
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        # Windowed layers may have other heads, which no field of the config names
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        is_ours = length is not None and not (isinstance(layer, LazyLayer) and layer.is_sliding)
        if is_alone and is_ours:
            listed = " or ".join(map(str, sorted(self.expected_heads)))
            raise ValueError(
                f"the cache was made for a model of {listed} key/value heads, but layer {layer_idx} of the one that "
                f"it is used with has {num_heads}: make one with `{type(self).__name__}(model)` for each model"
            )

    def _take_back(self) -> None:
        """Lets go of what the layers before got in this forward, so that the cache can still be used."""
        for index, (_, count) in (self._given or {}).items():
            layer = self.layers[index]
            if isinstance(layer, LazyLayer) and layer.is_croppable and layer.can_crop(count):
                layer.crop_tokens(count)
        self._given, self._newest = None, _NONE


def key_value_heads(config: PreTrainedConfig) -> frozenset[int]:
    """The numbers of key/value heads that a (decoder's) config names; none where states are of another form."""
    heads: set[int] = set()
    for layer_config in configs_of_layers(config):
        fields = layer_config.to_dict()
        # Latent attention caches what all query heads share
        if fields.get("kv_lora_rank") is not None or not isinstance(fields.get("num_key_value_heads"), int):
            return frozenset()
        for name, value in fields.items():
            # Some models name other numbers for some of their layers
            if "key_value_heads" in name or "kv_heads" in name:
                heads.update(each for each in (value if isinstance(value, list | tuple) else [value]) if each)
    return frozenset(heads)
