"""One GEAR layer as a document and tensors, and back: what comes from a file is checked in every number.

What the options decide (bits, groups, rotation) is not in the file of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.codecs.groups import GroupCodec
from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.layers.packed_tokens import Block, GroupBlock, LayerState

from .config import GEARConfig
from .exact_snapshot import check_order, exact_tensors, exact_to_document, read_counters, read_exact_state, read_sizes


_BLOCK_NUMBERS = ("start", "num_chunks", "length")


def layer_to_document(state: LayerState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the document and the tensors of a layer."""
    tensors = exact_tensors(state)
    own = [block for block in state.blocks if isinstance(block, GroupBlock)]
    for number, block in enumerate(own):
        for side, states in (("keys", block.keys), ("values", block.values)):
            for name, tensor in states.named_tensors():
                tensors[f"blocks.{number}.{side}.{name}"] = tensor[:, :, : block.num_chunks]
    blocks = [{name: getattr(block, name) for name in _BLOCK_NUMBERS} for block in own]
    return {**exact_to_document(state), "blocks": blocks}, tensors


def layer_from_document(
    document: Document,
    stored: StoredTensors,
    config: GEARConfig,
    counter_names: Sequence[str],
    sliding_window: int | None = None,
) -> LayerState:
    """
    A layer from what a file holds of it.

    Args:
        document (`Document`): its numbers; all have to be of use.
        stored (`StoredTensors`): its tensors.
        config (`GEARConfig`): the options of the cache.
        counter_names (`Sequence[str]`): what a layer counts.
        sliding_window (`int`, *optional*): tokens that a query sees; all by default.

    Raises:
        ValueError: if it is anything that no layer under these options can be.
    """
    sizes = read_sizes(document)
    codec = config.codec(sizes["key_head_dim"], sizes["value_head_dim"])
    blocks: list[Block] = [
        _read_block(block, stored.below(f"blocks.{number}."), codec, sizes, config.residual_length)
        for number, block in enumerate(document.rows("blocks"))
    ]
    counters = read_counters(document.inner("counters"), counter_names)
    exact = read_exact_state(document, stored, sizes, config.residual_length)
    state = LayerState(**exact, counters=counters, blocks=blocks, codec=codec)
    document.finish()
    check_order(state, sliding_window)
    if state.is_open:
        _check_open_block(state, codec, config.residual_length)
    return state


def _read_block(
    document: Document, stored: StoredTensors, codec: GroupCodec, sizes: dict[str, int], residual_length: int
) -> GroupBlock:
    start, num_chunks = document.integer("start"), document.integer("num_chunks", 1)
    length = document.integer("length", 1)
    document.finish()
    # Several chunks are all of decoded tokens
    dims = sizes["batch_size"], sizes["num_heads"], num_chunks, residual_length if num_chunks > 1 else None
    keys, values = (side.read(stored.below(f"{side.side}s."), *dims) for side in (codec.keys, codec.values))
    if values.chunk_length != keys.chunk_length or -(-length // keys.chunk_length) != num_chunks:
        raise ValueError(f"a block of {length} tokens does not fit {num_chunks} chunks of {keys.chunk_length}")
    return GroupBlock(keys, values, start=start, num_chunks=num_chunks, length=length)


def _check_open_block(state: LayerState, codec: GroupCodec, length: int) -> None:
    """Chunks of decoded tokens are written into the last block, which has to be of such."""
    block = state.blocks[-1] if state.blocks else None
    if not isinstance(block, GroupBlock) or not block.can_grow or block.chunk_length != length:
        raise ValueError("`is_open` asks for a last block of whole chunks")
    for side, states in ((codec.keys, block.keys), (codec.values, block.values)):
        if not side.is_of_decoded(states):
            raise ValueError(f"`is_open` asks for a last block of decoded tokens, but its {side.side}s are not")
