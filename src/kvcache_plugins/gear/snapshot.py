"""Saving and loading a GEAR cache, compressed as it is, as one safetensors file.

A long prefix is prefilled once and reused. A file holds the state of every layer, the options, and fingerprints of the
model whose states these are. It may come from anywhere: `files.schema` checks every field, and each layer what it
takes over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvcache_plugins.files.atomic import RefusedFile
from kvcache_plugins.files.records import Format, read_record
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.layer_state import DenseState, LayerState, State, expand_states
from kvcache_plugins.layers.model_match import holds_nothing
from kvcache_plugins.layers.static_layer import StaticLayer
from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint

from .config import GEARConfig, PresetChoice, TransformConfig


FORMAT = Format("kvcache_plugins.gear", 7, "prefill and `save` anew")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Snapshot:
    """
    What a file holds.

    Attributes:
        model, model_config, model_name (`str`): fingerprints of the model and of its config, and its name.
        has_config (`bool`): whether the cache was made for a model's config.
        config, choice: options of the cache, and why it is what it is.
        calibration (`str`, *optional*): digest of the calibration that says what its rows mean.
        layers (`list`): the state of each layer, `None` of one without tokens.
    """

    model: str
    model_config: str
    model_name: str
    has_config: bool
    config: GEARConfig | TransformConfig
    calibration: str | None
    choice: PresetChoice | None
    layers: list[State]


def read_snapshot(path: str | Path, model: PreTrainedModel | PreTrainedConfig) -> Snapshot:
    """Reads a file, within `refusals`; a `ValueError` if it is damaged, of another version, or of another model."""
    snapshot = read_record(path, FORMAT, Snapshot)
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
    return snapshot


def check_number(states: Sequence[object], num_layers: int, *, is_exact: bool = False) -> None:
    """Raises a `RefusedFile` if a file holds more layers than the model has, or others than so many."""
    if len(states) > num_layers or is_exact and len(states) != num_layers:
        raise RefusedFile(f"holds {len(states)} layers, but the model has {num_layers}")


def restore_layers(layers: Sequence[CacheLayerMixin], states: Sequence[State], device: torch.device) -> None:
    """
    Has every layer of a new cache take over its state, which may come from anywhere; a `ValueError` if a layer cannot
    be like that, or layers hold different tokens.
    """
    check_number(states, len(layers), is_exact=True)
    states = expand_states(layers, states)
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
            keys, values = state.keys.to(device), state.values.to(device)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if layer.is_sliding:
                layer.cumulative_length = state.length
            held.add((state.keys.shape[0], state.length))
        elif state is not None:
            raise ValueError(f"`{path}` is a `{type(state).__name__}`, which no `{type(layer).__name__}` is made of")
    if len(held) > 1:
        raise ValueError(f"its layers hold different numbers of sequences and tokens, {sorted(held)}")


def state_of(layer: CacheLayerMixin, index: int) -> State:
    """Returns the state of a layer, `None` if it holds nothing; a `ValueError` if more than keys and values."""
    if holds_nothing(layer):
        return None
    keeps_more = isinstance(layer, CompressedLayer) and (
        type(layer) not in (CompressedLayer, StaticLayer) or layer.has_index
    )
    if not isinstance(layer, CompressedLayer | DynamicLayer) or keeps_more:
        raise ValueError(f"`save` knows attention layers only, but layer {index} is a `{type(layer).__name__}`")
    if isinstance(layer, CompressedLayer):
        # One that all tokens were cropped from still counts what it did
        return layer.state() if layer.is_initialized else None
    length = layer.get_seq_length()
    if not length:
        return None
    assert layer.keys is not None and layer.values is not None
    # More than a window is there while a rollback may follow, which is over
    first = layer.keys.shape[2] - _num_held(layer, length)
    return DenseState(length, layer.keys[:, :, first:], layer.values[:, :, first:])


def _num_held(layer: DynamicLayer, length: int) -> int:
    """Tokens that a layer keeps of `length`: those that the next one can still see."""
    window = getattr(layer, "sliding_window", 1) if layer.is_sliding else 1
    return length if window == 1 else min(length, window - 1)
