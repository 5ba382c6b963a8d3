"""Checks that a cache is used with one model, and that each forward begins where the last one ended.

A cache gets states, layer by layer, and no model. Numbers of layers and heads are checked while it reads its first
prompt; later its layers refuse states that do not fit those held. When a forward begins, the first layer must hold as
many tokens as the last one; otherwise the forward before failed between them. So must every change of the batch have
reached all layers. When states are refused, the layers that have stored tokens of the same forward drop these again,
so that the cache stays usable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionLayer

from kvcache_plugins.models.layer_config import decoder_config

from .layer_factory import key_value_heads, replace_full_attention
from .lazy_layer import ANOTHER_PROMPT, LazyLayer
from .recurrent_state import select_sequences
from .static_layer import StaticLayer, traced_states
from .token_reuse import can_go_back, count_shared, limit_by_padding


# Error of a cache that gets the states of an encoder
ENCODER_STATES = (
    "`past_key_values` is a cache for the decoder's own tokens, and the encoder's would be stored among them: pass "
    "`EncoderDecoderCache(cache, DynamicCache())`"
)
_UNRECORDED = (
    "whose past is recorded only after `cache.activate_past_recording()`: call it before the tokens that will be "
    "removed"
)


class UsageChecksMixin(Cache):
    """
    Mixin of caches of `LazyLayer`s, before `Cache` in the bases.

    Attributes:
        expected_heads (`frozenset[int]`): numbers of key/value heads that the config names, if any.
    """

    expected_heads: frozenset[int] = frozenset()
    # True if the model's config is of an encoder and a decoder
    _has_encoder = False
    # Layer that every forward begins with
    _first_layer = 0
    # Tokens held when the current forward began: 0 while a first prompt is read
    _num_held = 0
    # True if some layers hold another batch than others
    _has_two_batches = False

    def __init__(
        self,
        layers: list[Any] | None = None,
        make_layer: Callable[[], Any] | None = None,
        config: PreTrainedConfig | None = None,
    ):
        super().__init__(layers=layers, layer_class_to_replicate=make_layer)  # type: ignore[arg-type]
        self._has_encoder = config is not None and config.is_encoder_decoder
        attending = (index for index, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin))
        self._first_layer = next(attending, 0)

    def _init_layers(self, config: PreTrainedConfig | None) -> None:
        """Make all layers of a model of the config; without one make each layer when its states come."""
        self.layers: list[Any] = []
        if config is None:
            UsageChecksMixin.__init__(self, make_layer=self._next_layer)
        else:
            config = decoder_config(config)
            self.expected_heads = key_value_heads(config)
            UsageChecksMixin.__init__(self, self._layers_for(config), config=config)

    def _layers_for(self, config: PreTrainedConfig) -> list[Any]:
        return replace_full_attention(config, self._layer)

    def _layer(self, layer_idx: int) -> Any:
        """Make a layer that holds tokens in this cache's way."""
        raise NotImplementedError

    def _next_layer(self) -> Any:
        return self._layer(len(self.layers))

    @property
    def is_linear(self) -> list[bool]:
        """True for layers of a recurrence without attention; older Transformers count hybrid layers among them."""
        # Without `super()`, as `torch.compile` knows no properties of bases
        return [_has_recurrence_alone(layer) for layer in self.layers]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Cache.update`; a `ValueError` if the states are another model's, before they are stored."""
        if torch.compiler.is_dynamo_compiling():
            layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
            if isinstance(layer, StaticLayer) and layer.graph is not None and key_states.shape[2] == 1:
                return traced_states(layer, key_states, value_states)
            return self._update_outside_of_graphs(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._first_layer:
            self._begin_forward(layer_idx)
        if not self._num_held or layer_idx >= len(self.layers):
            self._check_model(layer_idx, key_states.shape[1])
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    # `torch.compile` cannot trace it
    _update_outside_of_graphs = torch.compiler.disable(update)

    def _begin_forward(self, layer_idx: int) -> None:
        """Raise a `ValueError` if the forward before has not reached all layers, or goes on here."""
        attending = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        first, last = (each.get_seq_length() for each in (attending[0], attending[-1])) if attending else (0, 0)
        if first != last:
            if self._has_encoder and attending[1].get_seq_length() == last:
                self._undo_forward(layer_idx + 1)
                raise ValueError(ENCODER_STATES)
            raise ValueError(
                f"layer {layer_idx} holds {first} tokens, but the last of {len(self.layers)} layers {last}: a "
                f"forward broke off between them, or was of a model of fewer layers; `crop` its tokens, or make "
                f"{ANOTHER_PROMPT}"
            )
        if first:
            self._check_one_batch()
        self._has_two_batches = False
        self._num_held = first

    def _check_model(self, layer_idx: int, num_heads: int) -> None:
        """Raise a `ValueError` if a layer of a first prompt, or one not seen before, is of another model."""
        if layer_idx >= len(self.layers):
            self._check_has_layer(layer_idx)
            self._add_layers(layer_idx)
        if not self.expected_heads or num_heads in self.expected_heads:
            return
        # Ranks of tensor parallelism have a part of the heads each
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        # Windowed layers may have other heads, which no field of the config names
        layer = self.layers[layer_idx]
        if is_alone and isinstance(layer, LazyLayer) and not layer.is_sliding:
            self._undo_forward(layer_idx)
            listed = " or ".join(map(str, sorted(self.expected_heads)))
            raise ValueError(
                f"the cache was made for a model of {listed} key/value heads, but layer {layer_idx} of the one that "
                f"it is used with has {num_heads}: make one with `{type(self).__name__}(model)` for each model"
            )

    def _check_has_layer(self, layer_idx: int) -> None:
        """Raise a `ValueError` unless a layer beyond the last one may be added."""
        if self.layer_class_to_replicate is None:
            self._undo_forward(layer_idx)
            raise ValueError(
                f"the cache was made for a model of {len(self.layers)} layers, but the one that it is used with has "
                f"more: make one with `{type(self).__name__}(model)` for each model"
            )
        if self._num_held:
            self._undo_forward(layer_idx)
            raise ValueError(
                f"layer {layer_idx} holds 0 tokens, but layer {layer_idx - 1} {self._num_held}: what the cache holds "
                f"is of another model, or of a forward that broke off; make {ANOTHER_PROMPT}"
            )

    def _add_layers(self, layer_idx: int) -> None:
        """Make layers up to one, in a cache that was made without a config."""
        while self.layer_class_to_replicate is not None and len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())

    def _undo_forward(self, layer_idx: int) -> None:
        """Drop the tokens of the current forward from the layers before one, from recurrences a first prompt only."""
        for layer in self.layers[:layer_idx]:
            if isinstance(layer, LinearAttentionLayer) and not self._num_held:
                LinearAttentionLayer.reset(layer)
            count = layer.get_seq_length() - self._num_held if isinstance(layer, LazyLayer) else 0
            if count > 0 and layer.is_croppable and layer.can_crop(count):
                layer.crop_tokens(count)

    # States of a convolution or recurrence: see `Cache`; a `ValueError` if the cache was made without a config

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        self._check_has_config(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check_has_config(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._check_has_config(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def _check_has_config(self, layer_idx: int) -> None:
        if self.layer_class_to_replicate is not None:
            name = type(self).__name__
            raise ValueError(
                f"layer {layer_idx} of the model keeps states of a convolution or recurrence, for which a cache "
                f"has to be made from the model's config: write `{name}(model.config)` instead of `{name}()`"
            )

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """See `Cache.update_indexer`; called before `update` of the same layer."""
        self._add_layers(layer_idx)
        states: torch.Tensor = super().update_indexer(indexer_key_states, layer_idx)
        return states

    def crop(self, tokens_to_remove: int) -> None:
        """
        Remove the newest `-tokens_to_remove` tokens, or all; after a failed forward from the layers it reached.

        Raise a `ValueError` before any layer is changed if one has a recurrence, or a convolution or a full window of
        exact tokens that has recorded no past.
        """
        length = self.get_seq_length()
        remaining = length + tokens_to_remove
        if tokens_to_remove and length:
            self._check_croppable(remaining)
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer) and not layer.record_past:
                # Nothing is to be removed, and nothing more than needed is kept
                continue
            has_length = tokens_to_remove <= 0 and isinstance(layer, CacheLayerMixin)
            count = min(max(remaining, 0) - layer.get_seq_length(), 0) if has_length else tokens_to_remove
            if count or not _forgets_past(layer):
                layer.crop(count)

    def reuse(
        self, input_ids: torch.Tensor, held_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> int:
        """
        Crop the cache to the longest beginning that its tokens share with a new prompt, and return its length: the
        model reads only the rest. `generate` and forwards with the whole prompt continue from there.

        The sequences of a batch are cropped to the shortest of their beginnings, as a cache has one length. Layers
        that cannot go back (a window that has evicted tokens, a recurrence) empty the whole cache, and 0 is returned,
        unless the prompt continues all tokens held. Windows and convolutions can go back as far as they record:
        call `activate_past_recording()` before a turn that may be rewritten. A `fork` at the end of a turn goes back
        in any model.

        Token ids are all that is compared: prompts with other images are to be read by another cache. Tokens that stay
        are stored as they were: packed ones are not packed anew, by tables of the new prompt, as in a fresh cache.

        Args:
            input_ids (`torch.Tensor` of shape `[batch_size, tokens]`): the new prompt, from its first token on.
            held_ids (`torch.Tensor` of shape `[batch_size, tokens]`): the tokens that the cache has read: the output
                of the last `generate`. Tokens beyond the cache's length, which it has not read yet, are ignored.
            attention_mask (`torch.Tensor` of the shape of `input_ids`, *optional*): the new prompt's mask. It tells
                padding from tokens with the same id.

        Raises:
            ValueError: if the token ids are of other shapes, or `held_ids` are fewer than the cache holds.

        Example:

        ```python
        >>> output = model.generate(first_ids, past_key_values=cache)
        >>> num_reused = cache.reuse(second_ids, output)
        >>> output = model.generate(second_ids, past_key_values=cache)
        ```
        """
        num_held = self.get_seq_length()
        shared = count_shared(input_ids, held_ids, num_held, attention_mask)
        num_shared = int(limit_by_padding(shared, self.layers, attention_mask).min())
        count = num_held - num_shared
        if not all(can_go_back(layer, count) for layer in self.layers if count):
            self.reset()
            return 0
        # Layers that record the past drop what is older than a window
        if count or any(getattr(layer, "record_past", False) for layer in self.layers):
            self.crop(-count)
        return num_shared

    def _check_croppable(self, remaining: int) -> None:
        """Raise a `ValueError` if a layer has states that no token behind the `remaining` ones can be removed from."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionLayer):
                if any(layer.is_recurrent_states_initialized.values()):
                    raise ValueError(
                        f"`crop`: layer {index} has states of a recurrence, from which no token can be removed: "
                        "continue a copy of the cache from before these tokens, `copy.deepcopy(cache)`"
                    )
                if not layer.record_past:
                    raise ValueError(f"`crop`: layer {index} has a convolution, {_UNRECORDED}")
            if _forgets_past(layer) and remaining < layer.get_seq_length():
                raise ValueError(f"`crop`: layer {index} has a full sliding window, {_UNRECORDED}")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace every sequence of the batch by another one."""
        self._change_batch(lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch, states of recurrences too, which Transformers' own caches refuse."""

        def repeat(layer: Any) -> None:
            if isinstance(layer, LinearAttentionLayer) and not isinstance(layer, LazyLayer):
                select_sequences(layer, lambda numbers: numbers.repeat_interleave(repeats))
            if not _has_recurrence_alone(layer):
                layer.batch_repeat_interleave(repeats)

        self._change_batch(repeat)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences of the batch, states of recurrences too, which Transformers' own caches refuse."""

        def select(layer: Any) -> None:
            if isinstance(layer, LinearAttentionLayer) and not isinstance(layer, LazyLayer):
                select_sequences(layer, lambda numbers: numbers[indices])
            if not _has_recurrence_alone(layer):
                layer.batch_select_indices(indices)

        self._change_batch(select)

    def _change_batch(self, change: Callable[[Any], None]) -> None:
        """Change the batch of every layer; if a later layer than the first raises, no forward can follow."""
        had_two_batches = self._has_two_batches
        # A `LazyLayer` that raises is as it was
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, LazyLayer)):
            change(layer)
            self._has_two_batches = True
        self._has_two_batches = had_two_batches

    def _check_one_batch(self) -> None:
        """Raise a `ValueError` if a change of the batch has not reached all layers."""
        if self._has_two_batches:
            raise ValueError(
                "a change of the batch (`reorder_cache`, `batch_repeat_interleave` or `batch_select_indices`) broke "
                f"off between layers, which hold different sequences now: make {ANOTHER_PROMPT}"
            )


def _forgets_past(layer: object) -> bool:
    """Return true if a layer of Transformers has evicted tokens that `crop` would have to bring back."""
    if not isinstance(layer, DynamicSlidingWindowLayer) or layer.record_past:
        return False
    return layer.get_seq_length() >= layer.sliding_window


def _has_recurrence_alone(layer: object) -> bool:
    return isinstance(layer, LinearAttentionLayer) and not isinstance(layer, CacheLayerMixin)
