"""States of layers with their rows as streams, `codecs.row_streams`, for files, and states of layers again.

In a block of rows `stream0`, `stream1` and so on stand for the rows of sequence 0, 1 and so on, on both sides. All
else is as in any state: exact tokens, tables, the newest rows, and rows of another quantizer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.codecs.codec import CodecState
from kvcache_plugins.codecs.row_streams import Points, RowStreams
from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.files.schema import Stored, check_layout

from .compressed_layer import CompressedLayer
from .layer_state import DenseState, LayerState
from .packing import ROWS


State = LayerState | DenseState | None
_SIDES = "keys", "values"
_STREAM = "stream"


def compact_states(
    layers: Sequence[CacheLayerMixin], states: Sequence[State], tables: Sequence[CodecState | None] = ()
) -> list[State]:
    """Puts streams for rows in `states` of layers where they can; `tables` are given if states are without theirs."""
    found: list[State] = []
    tables = tables or [getattr(state, "tables", None) for state in states]
    below: dict[Any, Points] = {}
    for layer, state, own in zip(layers, states, tables, strict=True):
        points: dict[Any, Points] = {}
        if isinstance(state, LayerState) and state.blocks and ROWS in state.blocks[0].keys:
            block, sides = state.blocks[0], {}
            for side, writers in _row_streams(layer, state, own, "state").items():
                rows = getattr(block, side)[ROWS]
                sides[side] = {}
                for number, writer in enumerate(writers):
                    place = side, number, block.start, block.length
                    stream, points[place] = writer.write(rows[number], below.get(place))
                    if stream is not None:
                        sides[side][f"{_STREAM}{number}"] = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
            if sides and all(len(streams) == state.batch_size for streams in sides.values()):
                blocks = [dataclasses.replace(block, **sides), *state.blocks[1:]]
                state = dataclasses.replace(state, blocks=blocks)
            else:
                points = {}
        below = points
        found.append(state)
    return found


def expand_states(
    layers: Sequence[CacheLayerMixin], states: Sequence[State], tables: Sequence[CodecState | None] = ()
) -> list[State]:
    """
    Puts rows for streams in `states` that may come from anywhere; a `ValueError` if a stream does not hold the rows
    of its layer. States without streams stay as they are.
    """
    found: list[State] = []
    tables = tables or [getattr(state, "tables", None) for state in states]
    below: dict[Any, Points] = {}
    for index, (layer, state, own) in enumerate(zip(layers, states, tables, strict=True)):
        points: dict[Any, Points] = {}
        if isinstance(state, LayerState) and state.blocks and f"{_STREAM}0" in state.blocks[0].keys:
            block, sides, path = state.blocks[0], {}, f"layers.{index}"
            names = [f"{_STREAM}{number}" for number in range(min(state.batch_size, len(block.keys) + 1))]
            for side, readers in _row_streams(layer, state, own, path).items():
                streams, where = getattr(block, side), f"{path}.blocks.0.{side}"
                check_layout(where, streams, {name: Stored((None,), torch.uint8) for name in names})
                rows = []
                for number, (name, reader) in enumerate(zip(names, readers, strict=True)):
                    place = side, number, block.start, block.length
                    try:
                        stream = streams[name].numpy().tobytes()
                        each, points[place] = reader.read(stream, block.length, below.get(place))
                    except ValueError as error:
                        raise ValueError(f"`{where}.{name}`: {error}") from error
                    rows.append(each)
                sides[side] = {ROWS: torch.stack(rows)}
            if sides:
                state = dataclasses.replace(state, blocks=[dataclasses.replace(block, **sides), *state.blocks[1:]])
        below = points
        found.append(state)
    return found


def _row_streams(
    layer: CacheLayerMixin, state: LayerState, tables: CodecState | None, path: str
) -> dict[str, list[RowStreams]]:
    """Finds how both sides of every sequence are coded; nothing if that is not by rows of single numbers."""
    if not isinstance(layer, CompressedLayer):
        return {}
    codec = layer.packing.codec(state.key_head_dim, state.value_head_dim)
    if isinstance(codec, RowCodec) and layer.packing.fixed is None and tables is not None:
        codec = codec.restore(tables, (state.batch_size, state.num_heads), f"{path}.tables")
    elif layer.packing.fixed is None or not isinstance(codec, RowCodec):
        return {}
    found = {}
    for side, table in zip(_SIDES, codec.tables(torch.device("cpu")), strict=True):
        if table.quantizer != "lloyd-max":
            return {}
        own = [RowStreams(widths.cpu().numpy(), table.row_size) for widths in table.widths]
        found[side] = own * (state.batch_size // len(own))
    return found
