"""What layers of a `GEARCache` have in common in a file: sizes, exact tokens in front and behind, and their order."""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.files.document import MAX_INTEGER, Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.layers.packed_tokens import ExactPrefix, LayerState
from kvcache_plugins.layers.residual_buffer import ResidualBuffer


FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_SIZES = ("batch_size", "num_heads", "key_head_dim", "value_head_dim")
_MAX_SIZE = 2**20


def exact_to_document(state: LayerState) -> dict[str, Any]:
    """Every number of a layer but those of its blocks."""
    return {
        "dtype": str(state.dtype).removeprefix("torch."),
        **{name: getattr(state, name) for name in _SIZES},
        "length": state.length,
        "counters": state.counters,
        "held_start": state.held_start,
        "is_open": state.is_open,
        "prefix_is_uniform": state.prefix is not None and state.prefix.is_uniform,
    }


def exact_tensors(state: LayerState) -> dict[str, torch.Tensor]:
    """The tensors that are exact tokens, or say where they stand."""
    tensors: dict[str, torch.Tensor] = {}
    if state.buffer is not None:
        tensors |= {"buffer.keys": state.buffer.keys, "buffer.values": state.buffer.values}
    if state.prefix is not None:
        tensors |= {f"prefix.{name}": getattr(state.prefix, name) for name in ("keys", "values", "start", "count")}
    if state.padding is not None:
        tensors["padding"] = state.padding
    return tensors


def read_sizes(document: Document) -> dict[str, int]:
    """Batch size, heads and head dimensions."""
    return {name: document.integer(name, 1, _MAX_SIZE) for name in _SIZES}


def read_counters(document: Document, names: Sequence[str]) -> dict[str, int]:
    """What a layer counts."""
    counters = {name: document.integer(name) for name in names}
    document.finish()
    return counters


def read_exact_state(
    document: Document, stored: StoredTensors, sizes: dict[str, int], residual_length: int
) -> dict[str, Any]:
    """The fields of a `LayerState` that `exact_to_document` and `exact_tensors` wrote, counters aside."""
    return {
        **sizes,
        "dtype": FLOATS[document.choice("dtype", list(FLOATS))],
        "length": document.integer("length"),
        "held_start": document.integer("held_start"),
        "is_open": document.boolean("is_open"),
        "prefix": _read_prefix(stored, sizes, is_uniform=document.boolean("prefix_is_uniform")),
        "buffer": _read_buffer(stored, sizes, residual_length),
        "padding": read_positions("padding", stored, sizes["batch_size"]) if stored.has("padding") else None,
    }


def read_positions(name: str, stored: StoredTensors, batch_size: int) -> torch.Tensor:
    """A position for every item."""
    positions = stored.take(name, (batch_size,), torch.int64)
    if bool(((positions < 0) | (positions > MAX_INTEGER)).any()):
        raise ValueError(f"`{name}` has to be positions")
    return positions


def check_order(state: LayerState, sliding_window: int | None = None) -> None:
    """
    Raises a `ValueError` unless prefix, blocks and buffer follow each other, and end where the sequence does. Before
    what a window sees there may be nothing left.
    """
    first_seen = 0 if sliding_window is None else max(state.length - sliding_window + 1, 0)
    if state.held_start > first_seen:
        raise ValueError(f"there is nothing before token {state.held_start}, but token {first_seen} can be seen")
    exact_start = state.length - (0 if state.buffer is None else state.buffer.length)
    position = state.blocks[0].start if state.blocks else exact_start
    prefix = state.prefix
    if prefix is None:
        if state.length and (state.held_start == 0 or position != state.held_start):
            raise ValueError("there are tokens but none that they begin with")
    elif state.held_start:
        if position < state.held_start:
            raise ValueError("there are tokens before what has been let go of")
    # An item may begin behind all tokens, if `crop` has cut it to its padding
    elif bool(((prefix.end < position) | (prefix.end > exact_start) & (prefix.count > 0)).any()):
        raise ValueError("the exact tokens in front do not reach to those behind them, or go beyond")
    for block in state.blocks:
        if block.start != position:
            raise ValueError(f"a block begins at {block.start}, but the tokens before it end at {position}")
        position += block.length
    if position != exact_start or exact_start < 0:
        raise ValueError(f"compressed tokens end at {position}, but exact ones behind them begin at {exact_start}")
    if state.padding is not None and bool((state.padding > exact_start).all()):
        raise ValueError("`padding` goes beyond all tokens")


def _read_prefix(stored: StoredTensors, sizes: dict[str, int], *, is_uniform: bool) -> ExactPrefix | None:
    if not stored.has("prefix.keys"):
        return None
    keys, values = _read_exact("prefix", stored, sizes)
    start, count = (read_positions(f"prefix.{name}", stored, sizes["batch_size"]) for name in ("start", "count"))
    num_slots = keys.shape[2]
    if bool((count > num_slots).any()):
        raise ValueError(f"`prefix.count` has to be at most {num_slots}")
    if is_uniform and bool((start > 0).any() | (count < num_slots).any()):
        raise ValueError("`prefix_is_uniform` does not fit where the prefix is")
    return ExactPrefix(keys, values, start=start, count=count, is_uniform=is_uniform)


def _read_buffer(stored: StoredTensors, sizes: dict[str, int], residual_length: int) -> ResidualBuffer | None:
    if not stored.has("buffer.keys"):
        return None
    keys, values = _read_exact("buffer", stored, sizes)
    buffer = ResidualBuffer(keys, values, residual_length)
    buffer.append(keys, values)
    return buffer


def _read_exact(name: str, stored: StoredTensors, sizes: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    heads = sizes["batch_size"], sizes["num_heads"]
    keys = stored.take(f"{name}.keys", (*heads, None, sizes["key_head_dim"]), *FLOATS.values())
    values = stored.take(f"{name}.values", (*heads, keys.shape[2], sizes["value_head_dim"]), keys.dtype)
    return keys, values
