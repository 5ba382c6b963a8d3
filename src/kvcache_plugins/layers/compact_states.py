"""States of layers with their rows as streams, `codecs.row_streams`, for files, and states of layers again.

In the first block of a layer `stream0`, `stream1` and so on stand for the rows of sequence 0, 1 and so on, on both
sides. All else is as in any state: exact tokens, tables, newest rows, groups, and rows of another quantizer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.codecs.codec import CodecState
from kvcache_plugins.codecs.row_streams import Points, RowStreams
from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.files.schema import Stored, Tensors, check_layout

from .compressed_layer import CompressedLayer
from .layer_state import DenseState, LayerState
from .packing import ROWS


State = LayerState | DenseState | None
# Of every sequence, or of those before one that has none
_Points = list[Points]
_STREAM = "stream"


def compact_states(
    layers: Sequence[CacheLayerMixin], states: Sequence[State], tables: Sequence[CodecState | None] = ()
) -> list[Any]:
    """Puts streams for rows in `states` of layers where they can; `tables` are given if states are without theirs."""
    return _convert(_write, ROWS, layers, states, tables)


def expand_states(
    layers: Sequence[CacheLayerMixin], states: Sequence[State], tables: Sequence[CodecState | None] = ()
) -> list[State]:
    """
    Puts rows for streams in `states` that may come from anywhere; a `ValueError` if a stream does not hold the rows
    of its layer. States without streams stay as they are.
    """
    return _convert(_read, f"{_STREAM}0", layers, states, tables)


def _write(
    tensors: Tensors, coders: list[RowStreams], length: int, below: _Points, path: str
) -> tuple[Tensors | None, _Points]:
    streams: Tensors = {}
    points: _Points = []
    for number, coder in enumerate(coders):
        stream, own = coder.write(tensors[ROWS][number], below[number] if below else None)
        if stream is None:
            return None, []
        points.append(own)
        streams[f"{_STREAM}{number}"] = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
    return streams, points


def _read(
    tensors: Tensors, coders: list[RowStreams], length: int, below: _Points, path: str
) -> tuple[Tensors | None, _Points]:
    # One name that is missing is enough, however many a file asks for
    names = [f"{_STREAM}{number}" for number in range(min(len(coders), len(tensors) + 1))]
    check_layout(path, tensors, {name: Stored((None,), torch.uint8) for name in names})
    rows: list[torch.Tensor] = []
    points: _Points = []
    for number, name in enumerate(names):
        try:
            own = coders[number].read(tensors[name].numpy().tobytes(), length, below[number] if below else None)
        except ValueError as error:
            raise ValueError(f"`{path}.{name}`: {error}") from error
        rows.append(own[0])
        points.append(own[1])
    # Tensors of `torch.inference_mode()` could not be written to outside of it
    with torch.inference_mode(False):
        return {ROWS: torch.stack(rows)}, points


def _convert(
    convert: Callable[..., tuple[Tensors | None, _Points]],
    name: str,
    layers: Sequence[CacheLayerMixin],
    states: Sequence[State],
    tables: Sequence[CodecState | None],
) -> list[State]:
    """Converts both sides of the first block of every layer that has a tensor of a `name`, from the first layer on."""
    found: list[State] = []
    below: dict[Any, _Points] = {}
    for index, (layer, state) in enumerate(zip(layers, states, strict=True)):
        path = f"layers.{index}"
        points: dict[Any, _Points] = {}
        if isinstance(layer, CompressedLayer) and isinstance(state, LayerState) and state.blocks:
            block, of_layer = state.blocks[0], tables[index] if tables else state.tables
            sides: dict[str, Any] = {}
            coders = _coders(layer, state, of_layer, path) if name in block.keys else {}
            for side, own in coders.items():
                # Layers predict each other where they hold the same tokens
                place = side, state.batch_size, block.start, block.length
                tensors = getattr(block, side), own, block.length, below.get(place, []), f"{path}.blocks.0.{side}"
                sides[side], points[place] = convert(*tensors)
            if sides and None not in sides.values():
                state = dataclasses.replace(state, blocks=[dataclasses.replace(block, **sides), *state.blocks[1:]])
            else:
                points = {}
        below = points
        found.append(state)
    return found


def _coders(
    layer: CompressedLayer, state: LayerState, tables: CodecState | None, path: str
) -> dict[str, list[RowStreams]]:
    """Finds how both sides of every sequence are coded; nothing if that is not by rows of single numbers."""
    codec = layer.packing.codec(state.key_head_dim, state.value_head_dim)
    if not isinstance(codec, RowCodec) or (layer.packing.fixed is None and tables is None):
        return {}
    if layer.packing.fixed is None and tables is not None:
        codec = codec.restore(tables, (state.batch_size, state.num_heads), f"{path}.tables")
    found = {}
    for side, table in zip(("keys", "values"), codec.tables(torch.device("cpu")), strict=True):
        if table.quantizer != "lloyd-max":
            return {}
        own = [RowStreams(widths.cpu().numpy(), table.row_size) for widths in table.widths]
        found[side] = own * (state.batch_size // len(own))
    return found
