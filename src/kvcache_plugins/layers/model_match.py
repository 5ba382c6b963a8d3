"""Layers of a model's config, in a cache that is told of no model when it is used.

A method may replace layers of full attention, and of those with a window what it can take; other bounded ones stay
Transformers' own. Of layers whose attention runs beside a convolution or a recurrence, as in Falcon-H1, the states of
these are small, do not grow, and stay exact, as Transformers' own code keeps them; keys and values are a method's.

Only states arrive, layer by layer, and are checked before they are stored. As a forward begins, the first layer has to
hold as many tokens as the last one, or the forward before broke off between them. A layer that the cache has not, or
one of other key/value heads, is another model's: layers before it then drop the tokens of this forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvcache_plugins.models.layer_config import configs_of_layers, decoder_config
from kvcache_plugins.user_warnings import warn_user

from .lazy_layer import ANOTHER_PROMPT, LazyLayer
from .static_layer import StaticLayer, traced_states


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
_HYBRID_LAYERS = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


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
    # The layer updated last, if a forward may be under way, and what the first one held before that
    _newest: int | None = None
    _held = 0

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
        if self._newest is None or layer_idx <= self._newest:
            # In order of the layers, as long as it is one forward
            self._begin_forward(layer_idx)
        num_heads = key_states.shape[1]
        if layer_idx >= len(self.layers) or (self.expected_heads and num_heads not in self.expected_heads):
            self._check_states(num_heads, layer_idx)
        self._newest = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    # Nothing that `torch.compile` could trace
    _update_outside_of_graphs = torch.compiler.disable(update)

    def _begin_forward(self, layer_idx: int) -> None:
        """Raise a `ValueError` if the forward before the one that begins with a layer broke off, or goes on here."""
        if self._is_watched and layer_idx == self._newest:
            self._refuse(layer_idx + 1, ENCODER_STATES)
        self._held = self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0
        last = next((layer for layer in reversed(self.layers) if isinstance(layer, CacheLayerMixin)), None)
        length = 0 if last is None else last.get_seq_length()
        if layer_idx < len(self.layers) and length != self._held:
            raise ValueError(
                f"layer {layer_idx} holds {self._held} tokens, but the last of {len(self.layers)} layers {length}: a "
                f"forward broke off between them, or was of a model of fewer layers; `crop` its tokens, or make "
                f"{ANOTHER_PROMPT}"
            )

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

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens, or all; of a forward that broke off, where they are held."""
        left = self.get_seq_length() + tokens_to_remove
        for layer in self.layers:
            has_length = tokens_to_remove <= 0 and isinstance(layer, CacheLayerMixin)
            layer.crop(min(max(left, 0) - layer.get_seq_length(), 0) if has_length else tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self._newest = None

    def _check_states(self, num_heads: int, layer_idx: int) -> None:
        """Raise a `ValueError` if states of a layer not seen before, or of other heads, are of another model."""
        if layer_idx >= len(self.layers) and self.layer_class_to_replicate is None:
            self._refuse(
                layer_idx,
                f"the cache was made for a model of {len(self.layers)} layers, but the one that it is used with has "
                f"more: make one with `{type(self).__name__}(model)` for each model",
            )
        if layer_idx >= len(self.layers) and self._held:
            self._refuse(
                layer_idx,
                f"layer {layer_idx} holds 0 tokens, but layer {self._newest} {self._held}: what the cache holds is of "
                f"another model, or of a forward that broke off; make {ANOTHER_PROMPT}",
            )
        if not self.expected_heads or num_heads in self.expected_heads:
            return
        # Ranks of tensor parallelism have a part of the heads each
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        # Windowed layers may have other heads, which no field of the config names
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if is_alone and (layer is None or isinstance(layer, LazyLayer) and not layer.is_sliding):
            listed = " or ".join(map(str, sorted(self.expected_heads)))
            self._refuse(
                layer_idx,
                f"the cache was made for a model of {listed} key/value heads, but layer {layer_idx} of the one that "
                f"it is used with has {num_heads}: make one with `{type(self).__name__}(model)` for each model",
            )

    def _refuse(self, layer_idx: int, message: str) -> NoReturn:
        """Raise a `ValueError`; the layers before one drop what they got in this forward: the cache stays usable."""
        for layer in self.layers[:layer_idx]:
            count = layer.get_seq_length() - self._held if isinstance(layer, LazyLayer) else 0
            if count > 0 and layer.is_croppable and layer.can_crop(count):
                layer.crop_tokens(count)
        self._newest = None
        raise ValueError(message)


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
