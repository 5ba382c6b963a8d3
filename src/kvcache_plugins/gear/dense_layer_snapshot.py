"""One of Transformers' own layers, as of sliding windows, as a document and tensors, and back."""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors

from .exact_snapshot import FLOATS


def dense_layer_to_document(layer: DynamicLayer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What is written of a layer that has tokens."""
    assert layer.keys is not None and layer.values is not None
    length = layer.get_seq_length()
    # More than a window is there while a rollback may follow, which is over
    first = layer.keys.shape[2] - _num_held(layer, length)
    return {"length": length}, {"keys": layer.keys[:, :, first:], "values": layer.values[:, :, first:]}


def fill_dense_layer(layer: DynamicLayer, document: Document, stored: StoredTensors, device: torch.device) -> None:
    """
    Takes over what a file holds of a layer.

    Raises:
        ValueError: if the layer cannot be like that.
    """
    length = document.integer("length", 1)
    document.finish()
    held = _num_held(layer, length)
    keys = stored.take("keys", (None, None, held, None), *FLOATS.values()).to(device)
    values = stored.take("values", (*keys.shape[:3], None), keys.dtype).to(device)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if layer.is_sliding:
        layer.cumulative_length = length


def _num_held(layer: DynamicLayer, length: int) -> int:
    """Tokens that a layer keeps of `length`: those that the next one can still see."""
    window = getattr(layer, "sliding_window", 1) if layer.is_sliding else 1
    return length if window == 1 else min(length, window - 1)
