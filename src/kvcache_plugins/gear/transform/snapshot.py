"""One transform-coded layer as a document and tensors, and back: what comes from a file is checked in every number.

What the options decide (how many bytes a row has) is not in the file of a layer.

    blocks.0.keys, blocks.0.values, ...   rows of consecutive tokens, without spare room
    coder.keys.*, coder.values.*          the tables that say what rows mean, and the frequencies of the rotation
                                          (not of a calibrated layer: those are the calibration's)
    prefix.*, buffer.*, padding           exact tokens, as of any layer
    moments.*, waiting                    what a table will be made of, while an item has none
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.codecs.prompt_codec import PromptCodec, read_moments
from kvcache_plugins.codecs.rope import candidate_layouts
from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.gear.exact_snapshot import (
    check_order,
    exact_tensors,
    exact_to_document,
    read_counters,
    read_exact_state,
    read_sizes,
)

from .config import TransformConfig
from .layer_state import TransformLayerState
from .storage import CodedBlock


def layer_to_document(state: TransformLayerState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What is written of a layer."""
    tensors = exact_tensors(state)
    for number, block in enumerate(state.blocks):
        for side, rows in (("keys", block.keys), ("values", block.values)):
            tensors[f"blocks.{number}.{side}"] = rows[:, :, : block.length]
    coder = None if state.codec is None else state.codec.to_document()
    if coder is not None:
        tensors |= {f"coder.{name}": tensor for name, tensor in coder[1].items()}
    if state.moments is not None:
        tensors |= {f"moments.{name}": getattr(state.moments, name) for name in ("squares", "products")}
    if state.waiting_items is not None:
        tensors["waiting"] = state.waiting_items.to(torch.uint8)
    document = {
        **exact_to_document(state),
        "blocks": [{"start": block.start, "length": block.length} for block in state.blocks],
        "coder": None if coder is None else coder[0],
    }
    return document, tensors


def layer_from_document(
    document: Document,
    stored: StoredTensors,
    config: TransformConfig,
    frequencies: tuple[float, ...] | None,
    fixed: Codec | None,
    counter_names: Sequence[str],
    sliding_window: int | None = None,
) -> TransformLayerState:
    """
    A layer from what a file holds of it.

    Args:
        document (`Document`): its numbers; all have to be of use.
        stored (`StoredTensors`): its tensors.
        config (`TransformConfig`): the options of the cache.
        frequencies (`tuple[float, ...]`, *optional*): of the rotary embedding, as the layer has them.
        fixed (`Codec`, *optional*): how tokens are coded, if that does not depend on the prompt.
        counter_names (`Sequence[str]`): what a layer counts.
        sliding_window (`int`, *optional*): tokens that a query sees; all by default.

    Raises:
        ValueError: if it is anything that no layer under these options can be.
    """
    sizes = read_sizes(document)
    exact = read_exact_state(document, stored, sizes, config.residual_length)
    layouts = candidate_layouts(frequencies, sizes["key_head_dim"])
    heads, head_dims = (sizes["batch_size"], sizes["num_heads"]), (sizes["key_head_dim"], sizes["value_head_dim"])
    codec: Codec | None = None
    if fixed is not None:
        _check_fixed(document, heads, head_dims, fixed)
        # Coded from where the exact tokens in front end, of which a window may have let go
        codec = fixed if exact["prefix"] is not None or exact["held_start"] else None
    elif not document.is_null("coder"):
        unfitted = PromptCodec(head_dims, config.code_bytes(*head_dims), layouts, config.quantizer)
        codec = unfitted.read(document.inner("coder"), stored.below("coder."), heads)
    blocks = [
        _read_block(block, stored.below(f"blocks.{number}."), codec, heads)
        for number, block in enumerate(document.rows("blocks"))
    ]
    has_moments = stored.has("moments.squares")
    state = TransformLayerState(
        **exact,
        counters=read_counters(document.inner("counters"), counter_names),
        codec=codec,
        blocks=blocks,
        moments=read_moments(stored.below("moments."), heads, head_dims[0], len(layouts)) if has_moments else None,
        waiting_items=_read_waiting(stored, sizes["batch_size"]),
    )
    document.finish()
    _check_parts(state, sliding_window)
    return state


def _read_block(document: Document, stored: StoredTensors, codec: Codec | None, heads: tuple[int, int]) -> CodedBlock:
    start, length = document.integer("start"), document.integer("length", 1)
    document.finish()
    if codec is None:
        raise ValueError("there are rows, but no tables")
    keys, values = (
        stored.take(side, (*heads, length, row_size), torch.uint8)
        for side, row_size in zip(("keys", "values"), codec.row_sizes, strict=True)
    )
    return CodedBlock(keys, values, start=start, length=length)


def _check_fixed(document: Document, heads: tuple[int, int], head_dims: tuple[int, int], codec: Codec) -> None:
    if not document.is_null("coder"):
        raise ValueError("there is a fixed codec, but the layer has tables of its own")
    keys, values = (torch.empty(*heads, 0, dim, device="meta") for dim in head_dims)
    codec.check_shapes(keys, values)


def _read_waiting(stored: StoredTensors, batch_size: int) -> torch.Tensor | None:
    if not stored.has("waiting"):
        return None
    waiting = stored.take("waiting", (batch_size,), torch.uint8)
    if bool((waiting > 1).any()):
        raise ValueError("`waiting` has to be 0 or 1")
    return waiting.bool()


def _check_parts(state: TransformLayerState, sliding_window: int | None) -> None:
    """What goes with tables is there with them, what goes without is not, and tokens follow each other."""
    prefix, waiting = state.prefix, state.waiting_items
    if state.codec is None:
        length = 0 if state.buffer is None else state.buffer.length
        if prefix is not None or waiting is not None or state.is_open or length != state.length:
            raise ValueError("there are no tables, but not all tokens are exact ones behind them")
        return
    has_begin = prefix is not None or (state.held_start > 0 and waiting is None)
    if not has_begin or (state.moments is not None and waiting is None) or (state.is_open and not state.blocks):
        raise ValueError("there are tables, but not what goes with them")
    check_order(state, sliding_window)
    exact_start = state.length - (0 if state.buffer is None else state.buffer.length)
    if prefix is not None and waiting is not None and bool((prefix.end[waiting] < exact_start).any()):
        raise ValueError("an item that waits for a table has to have all its tokens in front")
