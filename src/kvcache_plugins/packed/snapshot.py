"""Content of a packed cache's file: the states of all layers, the options, and fingerprints of the model.

A file may come from anywhere. `files.schema` checks every field, and each layer checks the state that it is restored
from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.files.atomic import RefusedFile
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.layer_factory import attention_class
from kvcache_plugins.layers.layer_state import DenseState, LayerState, State
from kvcache_plugins.layers.recurrent_state import RecurrentStates, restore_recurrent_states
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.layers.static_group_layer import StaticGroupLayer
from kvcache_plugins.layers.static_row_layer import StaticRowLayer
from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint
from kvcache_plugins.reports.memory import StatValue


# Layers whose state is a `LayerState`
PACKED_CLASSES = GroupLayer, RowLayer, StaticGroupLayer, StaticRowLayer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PresetChoice:
    """
    Measurements for which `kvcache_plugins.choose_cache` chose a cache.

    Attributes:
        preset (`str`): a name of `list_caches()`, or `name:key=value,...` with options.
        kl (`float`): its mean KL(dense || cache) over the held-out tokens, in nats.
        max_kl (`float`): the bound of the KL.
        kl_by_preset (`dict[str, float]`): KL of every candidate that was tried, the cheapest first.
    """

    preset: str
    kl: float
    max_kl: float
    kl_by_preset: dict[str, float]

    def stats(self) -> dict[str, StatValue]:
        """Return entries for `stats()` of the chosen cache."""
        return {
            "chosen_preset": self.preset,
            "chosen_kl": self.kl,
            "max_kl": self.max_kl,
            "kl_by_preset": dict(self.kl_by_preset),
        }


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """
    Content of a file, to which the record of each class adds its options.

    Attributes:
        model, model_config, model_name (`str`): fingerprints of the model and of its config, and its name.
        has_config (`bool`): True if the cache was made for a model's config.
        choice (`PresetChoice`, *optional*): the measurements of `choose_cache`, if it chose the cache.
        layers (`list`): keys and values of each layer, `None` for an empty one and for one without attention.
        recurrent (`list`, *optional*): states of convolutions and recurrences of each layer, if the model has any.
    """

    model: str
    model_config: str
    model_name: str
    has_config: bool
    choice: PresetChoice | None
    layers: list[State]
    recurrent: RecurrentStates = None


def check_snapshot(snapshot: Snapshot, model: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise a `RefusedFile` if a file was made with another model."""
    name = snapshot.model_name or "unnamed"
    config = model if isinstance(model, PreTrainedConfig) else model.config
    if isinstance(model, PreTrainedConfig):
        if snapshot.model_config != config_fingerprint(model):
            raise RefusedFile(f"was made by another model ({name}): its states mean nothing to one of this config")
    elif snapshot.model != fingerprint(model):
        raise RefusedFile(
            f"was made by another model ({name}), or by the same one in another dtype: its states mean nothing to "
            "this one"
        )
    check_number(snapshot.layers, config.get_text_config(decoder=True).num_hidden_layers)


def check_number(states: Sequence[object], num_layers: int, *, is_exact: bool = False) -> None:
    """Raise a `RefusedFile` if a file holds more layers than the model has, or, if `is_exact`, another number."""
    if len(states) > num_layers or is_exact and len(states) != num_layers:
        raise RefusedFile(f"holds {len(states)} layers, but the model has {num_layers}")


def restore_layers(
    layers: Sequence[CacheLayerMixin], states: Sequence[State], recurrent: RecurrentStates, device: torch.device
) -> None:
    """
    Restore every layer of a new cache from its states. Raise a `ValueError` if a layer cannot have them, or if layers
    hold different numbers of tokens.
    """
    check_number(states, len(layers), is_exact=True)
    if recurrent is not None:
        check_number(recurrent, len(layers), is_exact=True)
    held = set()
    for index, (layer, state) in enumerate(zip(layers, states, strict=True)):
        path = f"layers.{index}"
        if isinstance(layer, CompressedLayer) and isinstance(state, LayerState):
            layer.restore(state, device, path)
            held.add((state.batch_size, state.length))
        elif isinstance(layer, DynamicLayer) and isinstance(state, DenseState):
            if state.keys.shape[2] != _num_held(layer, state.length):
                raise ValueError(
                    f"`{path}` holds {state.keys.shape[2]} of {state.length} tokens, which no such layer does"
                )
            keys = state.keys.to(device)
            values = state.values.to(device)
            layer.lazy_initialization(keys, values)
            layer.keys = keys
            layer.values = values
            if layer.is_sliding:
                layer.cumulative_length = state.length
            held.add((state.keys.shape[0], state.length))
        elif state is not None:
            raise ValueError(f"`{path}` is a `{type(state).__name__}`, which no `{type(layer).__name__}` is made of")
    if len(held) > 1:
        raise ValueError(f"its layers hold different numbers of sequences and tokens, {sorted(held)}")
    batch_size, length = held.pop() if held else (0, 0)
    restore_recurrent_states(layers, recurrent, batch_size if length else 0, device)


def state_of(layer: CacheLayerMixin, index: int) -> State:
    """
    Return keys and values of a layer, `None` for an empty one and for one without attention; raise a `ValueError` if
    they are in a form of their own.
    """
    if not isinstance(layer, CacheLayerMixin):
        return None
    kind = attention_class(layer)
    is_packed = kind in PACKED_CLASSES and not getattr(layer, "has_index", False)
    if not is_packed and kind not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ValueError(
            f"`save` knows layers of plain attention and of recurrences only, but layer {index} is a "
            f"`{type(layer).__name__}`"
        )
    if isinstance(layer, CompressedLayer):
        # A layer that was cropped to nothing has a state for its counters
        return layer.state() if layer.is_initialized else None
    assert isinstance(layer, DynamicLayer)
    length = layer.get_seq_length()
    if not length:
        return None
    assert layer.keys is not None and layer.values is not None
    # A layer that records the past for a rollback has more than its window; a file does not need it
    first = layer.keys.shape[2] - _num_held(layer, length)
    return DenseState(length, layer.keys[:, :, first:], layer.values[:, :, first:])


def _num_held(layer: DynamicLayer, length: int) -> int:
    """Return how many of `length` tokens a layer holds: all, or in a window those that the next token sees."""
    # With a window of one token Transformers drops none
    if not isinstance(layer, DynamicSlidingWindowLayer) or layer.sliding_window == 1:
        return length
    return min(length, layer.sliding_window - 1)
