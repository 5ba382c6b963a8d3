"""Saving and loading a GEAR cache, compressed as it is, as one safetensors file.

A long prefix is prefilled once and reused. The file holds the tensors of every layer, and beside them a document with
the options, the numbers that go with the tensors, and fingerprints of the model whose states these are. A file may
come from anywhere: whatever is read is checked against the options and the model before a layer takes it over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvcache_plugins.codecs.quantizers import QUANTIZERS
from kvcache_plugins.files.document import Document
from kvcache_plugins.files.refusal import RefusedFile
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.files.tensor_file import read_tensor_file, write_tensor_file
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.packing import GroupPacking
from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint

from .config import BACKBONES, SLIDING, GEARConfig, PresetChoice, SideConfig
from .dense_layer_snapshot import dense_layer_to_document, fill_dense_layer
from .layer_snapshot import layer_from_document, layer_to_document
from .transform.config import BACKBONE, TransformConfig
from .transform.snapshot import layer_from_document as transform_from_document
from .transform.snapshot import layer_to_document as transform_to_document


FORMAT = "kvcache_plugins.gear"
VERSION = 5
_ADVICE = "prefill and `save` anew"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """
    What a file holds, of which the layers are still to be checked.

    Attributes:
        config (`GEARConfig` or `TransformConfig`): options of the cache.
        calibration (`str`, *optional*): digest of the calibration that says what its rows mean.
        choice (`PresetChoice`, *optional*): why it is what it is.
        has_config (`bool`): whether the cache was made for a model's config.
        layers (`list[Document]`): one of each layer.
        tensors (`StoredTensors`): of all layers.
    """

    config: GEARConfig | TransformConfig
    calibration: str | None
    choice: PresetChoice | None
    has_config: bool
    layers: list[Document]
    tensors: StoredTensors

    def fill(self, layers: Sequence[CacheLayerMixin], device: torch.device) -> None:
        """
        Has every layer of a new cache take over what it holds.

        Raises:
            ValueError: if a layer cannot be what the file says, or layers hold different tokens.
        """
        if len(layers) != len(self.layers):
            raise RefusedFile(f"holds {len(self.layers)} layers, but the model has {len(layers)}")
        held = set()
        for index, (layer, document) in enumerate(zip(layers, self.layers, strict=True)):
            document.choice("type", [_name_of(layer)])
            is_filled, stored = document.boolean("is_filled"), self.tensors.below(f"layers.{index}.")
            if not is_filled:
                document.finish()
                continue
            held.add((self._fill_layer(layer, document, stored, device), layer.get_seq_length()))
        self.tensors.finish()
        if len(held) > 1:
            raise ValueError(f"its layers hold different numbers of sequences and tokens, {sorted(held)}")

    def _fill_layer(
        self, layer: CacheLayerMixin, document: Document, stored: StoredTensors, device: torch.device
    ) -> int:
        """Has a layer take over what the file holds of it, and returns for how many sequences."""
        if isinstance(layer, CompressedLayer):
            known = layer.counter_names, layer.sliding_window
            if isinstance(self.config, GEARConfig):
                state = layer_from_document(document, stored, self.config, *known)
            else:
                state = transform_from_document(document, stored, self.config, layer.packing, *known)
            layer.restore(state, device)
            return layer.batch_size
        assert isinstance(layer, DynamicLayer)
        fill_dense_layer(layer, document, stored, device)
        assert layer.keys is not None
        return layer.keys.shape[0]


def write_snapshot(
    path: str | Path,
    layers: Sequence[CacheLayerMixin],
    config: GEARConfig | TransformConfig,
    calibration: str | None,
    choice: PresetChoice | None,
    model: PreTrainedModel,
    *,
    has_config: bool,
) -> None:
    """Writes a cache; see `GEARCache.save`."""
    tensors: dict[str, torch.Tensor] = {}
    documents = []
    for index, layer in enumerate(layers):
        document, named = document_of(layer, index)
        documents.append(document)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in named.items()}
    content = {
        "model": fingerprint(model),
        "model_config": config_fingerprint(model.config),
        "model_name": model.config.name_or_path,
        "has_config": has_config,
        "config": config.to_options() if isinstance(config, TransformConfig) else dataclasses.asdict(config),
        "choice": None if choice is None else dataclasses.asdict(choice),
        "layers": documents,
    }
    if calibration is not None:
        content["calibration"] = calibration
    write_tensor_file(path, FORMAT, VERSION, content, tensors)


def read_snapshot(path: str | Path, model: PreTrainedModel | PreTrainedConfig) -> Snapshot:
    """
    Reads a file, within `refusals`; see `GEARCache.load`.

    Raises:
        ValueError: if it is damaged, of another version, or of another model.
    """
    document, tensors = read_tensor_file(path, FORMAT, VERSION, _ADVICE)
    digests = document.text("model"), document.text("model_config")
    name = document.text("model_name") or "unnamed"
    if isinstance(model, PreTrainedConfig):
        if digests[1] != config_fingerprint(model):
            raise RefusedFile(f"was made by another model ({name}): its states mean nothing to one of this config")
    elif digests[0] != fingerprint(model):
        raise RefusedFile(
            f"was made by another model ({name}), or by the same one in another dtype: its states mean nothing to "
            "this one"
        )
    snapshot = Snapshot(
        config=_read_config(document.inner("config")),
        calibration=document.text("calibration") if document.has("calibration") else None,
        choice=None if document.is_null("choice") else _read_choice(document.inner("choice")),
        has_config=document.boolean("has_config"),
        layers=document.rows("layers"),
        tensors=StoredTensors(tensors),
    )
    document.finish()
    config = model if isinstance(model, PreTrainedConfig) else model.config
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(snapshot.layers) > num_layers:
        raise RefusedFile(f"holds {len(snapshot.layers)} layers, but the model has {num_layers}")
    return snapshot


def _name_of(layer: CacheLayerMixin) -> str:
    """What a file calls a layer."""
    if type(layer) is CompressedLayer:
        return "gear" if isinstance(layer.packing, GroupPacking) else BACKBONE
    return type(layer).__name__


def document_of(layer: CacheLayerMixin, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    What a file holds of a layer.

    Raises:
        ValueError: if it holds more than keys and values, which no file would.
    """
    is_ours = isinstance(layer, CompressedLayer)
    keeps_more = is_ours and (type(layer) is not CompressedLayer or layer.has_index)
    if not is_ours and not isinstance(layer, DynamicLayer) or keeps_more:
        raise ValueError(f"`save` knows attention layers only, but layer {index} is a `{type(layer).__name__}`")
    # A GEAR layer that all tokens were cropped from still counts what it did
    is_filled = layer.get_seq_length() > 0 if isinstance(layer, DynamicLayer) else layer.is_initialized
    document: dict[str, Any] = {"type": _name_of(layer), "is_filled": is_filled}
    if not is_filled:
        return document, {}
    if isinstance(layer, CompressedLayer):
        write = layer_to_document if isinstance(layer.packing, GroupPacking) else transform_to_document
        more, tensors = write(layer.state())
    else:
        assert isinstance(layer, DynamicLayer)
        more, tensors = dense_layer_to_document(layer)
    return document | more, tensors


def _read_config(document: Document) -> GEARConfig | TransformConfig:
    if document.has("backbone"):
        return _read_transform_config(document)
    sides: dict[str, Any] = {side: _read_side(document.inner(side), side) for side in ("key", "value")}
    config = GEARConfig(
        **sides,
        q_group_size=None if document.is_null("q_group_size") else document.integer("q_group_size", 1),
        residual_length=document.integer("residual_length", 1),
        num_iterations=document.integer("num_iterations", 1),
        low_rank_recent_ratio=document.number("low_rank_recent_ratio"),
        num_sink_tokens=document.integer("num_sink_tokens"),
        rotate_values=document.boolean("rotate_values"),
        sliding=document.choice("sliding", SLIDING),
    )
    document.finish()
    return config


def _read_transform_config(document: Document) -> TransformConfig:
    document.choice("backbone", [BACKBONE])
    config = TransformConfig(
        key_nbits=document.number("key_nbits"),
        value_nbits=document.number("value_nbits"),
        residual_length=document.integer("residual_length", 1),
        num_sink_tokens=document.integer("num_sink_tokens"),
        quantizer=document.choice("quantizer", sorted(QUANTIZERS)),
        sliding=document.choice("sliding", SLIDING),
    )
    document.finish()
    return config


def _read_side(document: Document, side: str) -> SideConfig:
    config = SideConfig(
        side=document.choice("side", [side]),
        nbits=document.integer("nbits"),
        backbone=document.choice("backbone", BACKBONES),
        sparsity=document.number("sparsity"),
        rank=document.integer("rank"),
        decode_rank=document.integer("decode_rank"),
    )
    document.finish()
    return config


def _read_choice(document: Document) -> PresetChoice:
    choice = PresetChoice(
        preset=document.text("preset"),
        kl=document.number("kl"),
        max_kl=document.number("max_kl"),
        kl_by_preset=document.numbers("kl_by_preset"),
    )
    document.finish()
    return choice
