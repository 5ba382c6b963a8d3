"""Saving and loading a GEAR cache, compressed as it is, as one safetensors file.

A long prefix is prefilled once and reused. The file holds the tensors of every layer, and in its header a JSON
document with the format's version, the options, the numbers that go with the tensors, and a fingerprint of the model
whose states these are.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.ops.compressed_states import TENSOR_NAMES, CompressedStates
from kvcache_plugins.ops.quantization import Grouping

from .choice import PresetChoice
from .config import GEARConfig, SideConfig
from .layer import GEARLayer
from .storage import CompressedBlock, ExactPrefix


if TYPE_CHECKING:
    from .cache import GEARCache

FORMAT = "kvcache_plugins.gear"
VERSION = 3
_HEADER = "kvcache_plugins"


def save_cache(cache: GEARCache, path: str | Path, model: PreTrainedModel) -> None:
    """Writes `cache`; see `GEARCache.save`."""
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, GEARLayer):
            document, named = _layer_to_document(layer)
        elif isinstance(layer, DynamicLayer):
            document, named = _dense_layer_to_document(layer)
        else:
            raise ValueError(f"`save` knows attention layers only, but layer {index} is a `{type(layer).__name__}`")
        layers.append(document)
        tensors |= {f"layers.{index}.{name}": tensor.contiguous() for name, tensor in named.items()}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": fingerprint(model),
        "model_name": model.config.name_or_path,
        "has_config": cache.layer_class_to_replicate is None,
        "config": dataclasses.asdict(cache.gear_config),
        "choice": None if cache.choice is None else dataclasses.asdict(cache.choice),
        "layers": layers,
    }
    save_file(tensors, str(path), metadata={_HEADER: json.dumps(document)})


def load_cache(path: str | Path, model: PreTrainedModel) -> GEARCache:
    """Reads a cache; see `GEARCache.load`."""
    from .cache import GEARCache

    document, tensors = _read(Path(path))
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ValueError(
            f"`path`: {path} holds format {document.get('format')!r} version {document.get('version')}, but only "
            f"{FORMAT!r} version {VERSION} can be read"
        )
    if document["model"] != fingerprint(model):
        raise ValueError(
            f"`model`: the cache in {path} was made by another model ({document['model_name'] or 'unnamed'}), or by "
            "the same one in another dtype; its states mean nothing to this one"
        )
    sides: dict[str, Any] = {side: SideConfig(**document["config"].pop(side)) for side in ("key", "value")}
    cache = GEARCache(model.config if document["has_config"] else None)
    cache.gear_config = GEARConfig(**sides, **document["config"])
    # Files of before caches could be chosen have none
    if document.get("choice") is not None:
        cache.choice = PresetChoice(**document["choice"])
    if not document["has_config"]:
        cache.layers = [GEARLayer(cache.gear_config, index) for index in range(len(document["layers"]))]
    for index, (layer, layer_document) in enumerate(zip(cache.layers, document["layers"], strict=True)):
        prefix = f"layers.{index}."
        named = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        named = {name: tensor.to(model.device) for name, tensor in named.items()}
        if isinstance(layer, GEARLayer):
            layer.config = cache.gear_config
            _fill_layer(layer, layer_document, named)
        else:
            _fill_dense_layer(layer, layer_document, named)
    return cache


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise ValueError(f"`path`: there is no file {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"`path`: {path} is no safetensors file or is damaged: {error}") from error
    if header is None:
        raise ValueError(f"`path`: {path} is a safetensors file, but not one that `save` of a cache wrote")
    return json.loads(header), tensors


def _layer_to_document(layer: GEARLayer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    layer.settle_prompt()
    tensors: dict[str, torch.Tensor] = {}
    # A layer that all tokens were cropped from is as good as new
    document: dict[str, Any] = {"type": "gear", "is_initialized": layer.get_seq_length() > 0}
    if not document["is_initialized"]:
        return document, tensors
    document |= layer.scalars()
    document["blocks"] = [_block_to_document(f"blocks.{n}.", block, tensors) for n, block in enumerate(layer.blocks)]
    document["is_open"] = layer.has_open_block
    if layer.buffer is not None:
        tensors |= {"buffer.keys": layer.buffer.keys, "buffer.values": layer.buffer.values}
    if layer.prefix is not None:
        document["prefix_is_uniform"] = layer.prefix.is_uniform
        tensors |= {f"prefix.{name}": getattr(layer.prefix, name) for name in ("keys", "values", "start", "count")}
    if layer.padding is not None:
        tensors["padding"] = layer.padding
    return document, tensors


def _block_to_document(prefix: str, block: CompressedBlock, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    document: dict[str, Any] = {name: getattr(block, name) for name in ("start", "num_chunks", "length")}
    for side in ("keys", "values"):
        states: CompressedStates = getattr(block, side)
        tensors |= {
            f"{prefix}{side}.{name}": tensor[:, :, : block.num_chunks] for name, tensor in states.named_tensors()
        }
        document[side] = {
            "nbits": states.nbits,
            "grouping": dataclasses.asdict(states.grouping),
            "head_dim": states.head_dim,
            "is_rotated": states.is_rotated,
        }
    return document


def _fill_layer(layer: GEARLayer, document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    if not document["is_initialized"]:
        return
    blocks = [_block_from_document(f"blocks.{n}.", block, tensors) for n, block in enumerate(document["blocks"])]
    prefix = None
    if "prefix.keys" in tensors:
        states = {name: tensors[f"prefix.{name}"] for name in ("keys", "values", "start", "count")}
        prefix = ExactPrefix(**states, is_uniform=document["prefix_is_uniform"])
    buffer = None
    if "buffer.keys" in tensors:
        keys, values = tensors["buffer.keys"], tensors["buffer.values"]
        buffer = ResidualBuffer(keys, values, layer.config.residual_length)
        buffer.append(keys, values)
    layer.restore(
        document,
        device=next(iter(tensors.values())).device,
        blocks=blocks,
        is_open=document["is_open"],
        prefix=prefix,
        buffer=buffer,
        padding=tensors.get("padding"),
    )


def _block_from_document(prefix: str, document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> CompressedBlock:
    sides: dict[str, Any] = {}
    for side in ("keys", "values"):
        fields = {**document[side], "grouping": Grouping(**document[side]["grouping"])}
        fields |= {name: tensors.get(f"{prefix}{side}.{name}") for name in TENSOR_NAMES}
        sides[side] = CompressedStates(**fields)
    return CompressedBlock(**sides, **{name: document[name] for name in ("start", "num_chunks", "length")})


def _dense_layer_to_document(layer: DynamicLayer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    document: dict[str, Any] = {"type": type(layer).__name__, "is_initialized": layer.is_initialized}
    if not layer.is_initialized:
        return document, {}
    document["length"] = layer.get_seq_length()
    assert layer.keys is not None and layer.values is not None
    return document, {"keys": layer.keys, "values": layer.values}


def _fill_dense_layer(layer: DynamicLayer, document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    if not document["is_initialized"]:
        return
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    if layer.is_sliding:
        layer.cumulative_length = document["length"]
