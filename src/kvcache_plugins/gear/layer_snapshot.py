"""One GEAR layer as a document and tensors, and back: what comes from a file is checked in every number.

What the options decide (bits, groups, rotation) is not in the file of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.files.document import MAX_INTEGER, Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.ops.outlier_selection import num_outliers_per_side

from .config import GEARConfig
from .layer_state import GEARLayerState
from .storage import CompressedBlock, ExactPrefix
from .stored_states import SideLayout, read_states


FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_SIZES = ("batch_size", "num_heads", "key_head_dim", "value_head_dim")
_BLOCK_NUMBERS = ("start", "num_chunks", "length")
_MAX_SIZE = 2**20


def layer_to_document(state: GEARLayerState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What is written of a layer."""
    tensors: dict[str, torch.Tensor] = {}
    for number, block in enumerate(state.blocks):
        for side, states in (("keys", block.keys), ("values", block.values)):
            for name, tensor in states.named_tensors():
                tensors[f"blocks.{number}.{side}.{name}"] = tensor[:, :, : block.num_chunks]
    if state.buffer is not None:
        tensors |= {"buffer.keys": state.buffer.keys, "buffer.values": state.buffer.values}
    if state.prefix is not None:
        tensors |= {f"prefix.{name}": getattr(state.prefix, name) for name in ("keys", "values", "start", "count")}
    if state.padding is not None:
        tensors["padding"] = state.padding
    blocks = [{name: getattr(block, name) for name in _BLOCK_NUMBERS} for block in state.blocks]
    document = {
        "dtype": str(state.dtype).removeprefix("torch."),
        **{name: getattr(state, name) for name in _SIZES},
        "length": state.length,
        "counters": state.counters,
        "blocks": blocks,
        "is_open": state.is_open,
        "prefix_is_uniform": state.prefix is not None and state.prefix.is_uniform,
    }
    return document, tensors


def layer_from_document(
    document: Document, stored: StoredTensors, config: GEARConfig, counter_names: Sequence[str]
) -> GEARLayerState:
    """
    A layer from what a file holds of it.

    Args:
        document (`Document`): its numbers; all have to be of use.
        stored (`StoredTensors`): its tensors.
        config (`GEARConfig`): the options of the cache.
        counter_names (`Sequence[str]`): what a layer counts.

    Raises:
        ValueError: if it is anything that no layer under these options can be.
    """
    sizes = {name: document.integer(name, 1, _MAX_SIZE) for name in _SIZES}
    config.validate_head_dim(sizes["key_head_dim"], sizes["value_head_dim"])
    batch_size = sizes["batch_size"]
    length = document.integer("length")
    blocks = [
        _read_block(block, stored.below(f"blocks.{number}."), config, sizes)
        for number, block in enumerate(document.rows("blocks"))
    ]
    state = GEARLayerState(
        dtype=FLOATS[document.choice("dtype", list(FLOATS))],
        **sizes,
        length=length,
        counters=_read_counters(document.inner("counters"), counter_names),
        blocks=blocks,
        is_open=document.boolean("is_open"),
        prefix=_read_prefix(stored, sizes, is_uniform=document.boolean("prefix_is_uniform")),
        buffer=_read_buffer(stored, sizes, config),
        padding=_read_positions("padding", stored, batch_size) if stored.has("padding") else None,
    )
    document.finish()
    _check_order(state)
    if state.is_open:
        _check_open_block(state, config)
    return state


def _read_counters(document: Document, names: Sequence[str]) -> dict[str, int]:
    counters = {name: document.integer(name) for name in names}
    document.finish()
    return counters


def _read_block(
    document: Document, stored: StoredTensors, config: GEARConfig, sizes: dict[str, int]
) -> CompressedBlock:
    start, num_chunks = document.integer("start"), document.integer("num_chunks", 1)
    length = document.integer("length", 1)
    document.finish()
    keys, values = (
        read_states(
            stored.below(f"{side}s."),
            SideLayout.of(
                f"{side}s", config, sizes["batch_size"], sizes["num_heads"], sizes[f"{side}_head_dim"], num_chunks
            ),
        )
        for side in ("key", "value")
    )
    if values.chunk_length != keys.chunk_length or -(-length // keys.chunk_length) != num_chunks:
        raise ValueError(f"a block of {length} tokens does not fit {num_chunks} chunks of {keys.chunk_length}")
    return CompressedBlock(keys, values, start=start, num_chunks=num_chunks, length=length)


def _read_prefix(stored: StoredTensors, sizes: dict[str, int], *, is_uniform: bool) -> ExactPrefix | None:
    if not stored.has("prefix.keys"):
        return None
    keys, values = _read_exact("prefix", stored, sizes)
    start, count = (_read_positions(f"prefix.{name}", stored, sizes["batch_size"]) for name in ("start", "count"))
    num_slots = keys.shape[2]
    if bool((count > num_slots).any()):
        raise ValueError(f"`prefix.count` has to be at most {num_slots}")
    if is_uniform and bool((start > 0).any() | (count < num_slots).any()):
        raise ValueError("`prefix_is_uniform` does not fit where the prefix is")
    return ExactPrefix(keys, values, start=start, count=count, is_uniform=is_uniform)


def _read_buffer(stored: StoredTensors, sizes: dict[str, int], config: GEARConfig) -> ResidualBuffer | None:
    if not stored.has("buffer.keys"):
        return None
    keys, values = _read_exact("buffer", stored, sizes)
    buffer = ResidualBuffer(keys, values, config.residual_length)
    buffer.append(keys, values)
    return buffer


def _read_exact(name: str, stored: StoredTensors, sizes: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    heads = sizes["batch_size"], sizes["num_heads"]
    keys = stored.take(f"{name}.keys", (*heads, None, sizes["key_head_dim"]), *FLOATS.values())
    values = stored.take(f"{name}.values", (*heads, keys.shape[2], sizes["value_head_dim"]), keys.dtype)
    return keys, values


def _read_positions(name: str, stored: StoredTensors, batch_size: int) -> torch.Tensor:
    positions = stored.take(name, (batch_size,), torch.int64)
    if bool(((positions < 0) | (positions > MAX_INTEGER)).any()):
        raise ValueError(f"`{name}` has to be positions")
    return positions


def _check_order(state: GEARLayerState) -> None:
    """Prefix, blocks and buffer have to follow each other, and to end where the sequence does."""
    exact_start = state.length - (0 if state.buffer is None else state.buffer.length)
    position = state.blocks[0].start if state.blocks else exact_start
    prefix = state.prefix
    if prefix is None:
        if state.length:
            raise ValueError("there are tokens but none that they begin with")
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


def _check_open_block(state: GEARLayerState, config: GEARConfig) -> None:
    """Chunks of decoded tokens are written into the last block, which has to be of such."""
    length = config.residual_length
    block = state.blocks[-1] if state.blocks else None
    if block is None or not block.is_full or block.chunk_length != length:
        raise ValueError("`is_open` asks for a last block of whole chunks")
    num_channels = state.num_heads * state.key_head_dim, state.num_heads * state.value_head_dim
    num_outliers = (
        num_channels[0] * 2 * num_outliers_per_side(length, config.key.sparsity),
        length * 2 * num_outliers_per_side(num_channels[1], config.value.sparsity),
    )
    for side, states, wanted in zip((config.key, config.value), (block.keys, block.values), num_outliers, strict=True):
        shapes = {name: tensor.shape[3:] for name, tensor in states.named_tensors()}
        found = shapes.get("low_rank_a", (length, 0)), shapes.get("outlier_values", (0,))
        if found != ((length, side.decode_rank), (wanted,)):
            raise ValueError(f"`is_open` asks for a last block of decoded tokens, but its {side.side}s are not")
