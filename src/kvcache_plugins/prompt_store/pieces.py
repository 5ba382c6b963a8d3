"""A cache taken apart into what every block of its prompt has added to it, and put together again.

A piece is in the form in which a file holds a whole cache (`gear.snapshot`): a document and tensors of each layer.
What a first block brings beside its tokens (exact tokens in front, tables) is in its piece alone; all pieces have

    compressed layers     what the tokens of the block are compressed to
    Transformers' own     keys and values of the block's tokens, of sliding windows those that can still be seen

Together they make the document of the whole cache, and what reads files of caches checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.stored_tensors import StoredTensors
from kvcache_plugins.gear.snapshot import Snapshot, document_of
from kvcache_plugins.layers.compressed_layer import CompressedLayer

from .cache import PromptCache, Window


# What a document says of all tokens that there are, as opposed to those of a block
_OF_ALL_TOKENS = ("type", "is_filled", "length", "counters", "is_open", "blocks")
_BLOCK_NUMBERS = ("start", "num_chunks", "length")
# Those are there while an item has too few tokens, or was padded: a prompt alone, in blocks, has none of them
_FOREIGN = ("padding", "waiting", "moments.")
_COUNTED = ("tokens_compressed", "chunks_compressed")


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """
    What a block adds to a cache.

    Attributes:
        layers (`list[dict]`): of each layer `type`, `blocks` and, of the first piece, `head`, as JSON has them.
        tensors (`dict[str, torch.Tensor]`): by names that begin with `layers.` and the layer's index.
    """

    layers: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]


def check_layers(cache: PromptCache) -> None:
    """
    Raises:
        ValueError: if the cache has layers that hold more than keys and values.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (CompressedLayer, DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"`model`: layer {index} has states of another kind than keys and values (`{type(layer).__name__}`), "
                "of which a prompt's blocks cannot be kept"
            )


def cut_pieces(cache: PromptCache, numbers: Sequence[int]) -> list[Piece]:
    """
    Some blocks of a cache; tensors are views of its own where they can be.

    Args:
        cache (`PromptCache`): was fed these blocks one by one.
        numbers (`Sequence[int]`): which blocks.

    Raises:
        ValueError: if the cache does not hold these blocks as such.
    """
    length = cache.record.length
    pieces = [Piece([], {}) for _ in numbers]
    for index, layer in enumerate(cache.layers):
        document, tensors = document_of(layer, index)
        for number, piece in zip(numbers, pieces, strict=True):
            if isinstance(layer, DynamicSlidingWindowLayer):
                cut = _cut_window(document, cache.record.windows.get(number, {}).get(index), layer.sliding_window)
            else:
                cut = _cut_layer(document, tensors, index, slice(number * length, (number + 1) * length))
            piece.layers.append(cut[0])
            piece.tensors.update({f"layers.{index}.{name}": tensor for name, tensor in cut[1].items()})
    return pieces


def _cut_window(
    document: dict[str, Any], window: Window | None, size: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if window is None:
        raise ValueError("a sliding window has forgotten what it held at a block's end")
    keys, values = (states[:, :, max(states.shape[2] - size + 1, 0) :] for states in window)
    return {"type": document["type"], "blocks": []}, {"keys": keys, "values": values}


def _cut_layer(
    document: dict[str, Any], tensors: dict[str, torch.Tensor], index: int, tokens: slice
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a layer of full attention holds of some tokens, and if they are the first all else that it needs."""
    if not document["is_filled"]:
        raise ValueError(f"layer {index} holds nothing")
    if "blocks" not in document:
        cut = {name: states[:, :, tokens] for name, states in tensors.items()}
        return {"type": document["type"], "blocks": []}, cut
    foreign = sorted(name for name in tensors if name.startswith(_FOREIGN))
    if foreign or document["batch_size"] != 1:
        raise ValueError(f"layer {index} holds no prompt alone and without padding")
    piece: dict[str, Any] = {"type": document["type"]}
    taken = {}
    if tokens.start == 0:
        piece["head"] = {name: value for name, value in document.items() if name not in _OF_ALL_TOKENS}
        taken = {name: each for name, each in tensors.items() if not name.startswith(("blocks.", "buffer."))}
    is_rows = "coder" in document
    block, stored = (_cut_rows if is_rows else _cut_block)(document["blocks"], tensors, index, tokens)
    return piece | {"blocks": [block]}, taken | {f"blocks.0.{name}": tensor for name, tensor in stored.items()}


def _cut_block(
    blocks: list[dict[str, int]], tensors: dict[str, torch.Tensor], index: int, tokens: slice
) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Tokens that were compressed together, and with no others."""
    for number, block in enumerate(blocks):
        is_begun = block["start"] == tokens.start or (tokens.start == 0 and number == 0)
        if is_begun and block["num_chunks"] == 1 and block["start"] + block["length"] == tokens.stop:
            return block, _below(tensors, f"blocks.{number}.")
    raise ValueError(f"layer {index} has not compressed tokens {tokens.start} to {tokens.stop} together")


def _cut_rows(
    blocks: list[dict[str, int]], tensors: dict[str, torch.Tensor], index: int, tokens: slice
) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Tokens that were coded one by one."""
    block = blocks[0] if blocks else {"start": tokens.stop, "length": 0}
    start, end = max(tokens.start, block["start"]), block["start"] + block["length"]
    if not start < tokens.stop <= end:
        raise ValueError(f"layer {index} has not coded tokens {tokens.start} to {tokens.stop}")
    rows = slice(start - block["start"], tokens.stop - block["start"])
    cut = {side: tensors[f"blocks.0.{side}"][:, :, rows] for side in ("keys", "values")}
    return {"start": start, "length": tokens.stop - start}, cut


def read_piece(rows: list[Document], tensors: dict[str, torch.Tensor]) -> Piece:
    """
    A piece from what a file says of its layers.

    Raises:
        ValueError: if it is none.
    """
    layers = []
    for row in rows:
        layer: dict[str, Any] = {"type": row.text("type"), "blocks": []}
        if row.has("head"):
            head = row.inner("head")
            layer["head"] = {name: head.take(name) for name in head.names()}
        for block in row.rows("blocks"):
            layer["blocks"].append({name: block.integer(name) for name in _BLOCK_NUMBERS if block.has(name)})
            block.finish()
        row.finish()
        layers.append(layer)
    return Piece(layers, tensors)


def fill_cache(cache: PromptCache, pieces: Sequence[Piece], device: torch.device) -> None:
    """
    Has an empty cache take over what consecutive blocks, from the first on, have added to one.

    Raises:
        ValueError: if no cache of these options can be like that.
    """
    num_tokens = len(pieces) * cache.record.length
    documents: list[Document] = []
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        rows = [piece.layers[index] for piece in pieces if index < len(piece.layers)]
        if len(rows) < len(pieces):
            raise ValueError(f"there are no states of layer {index}")
        prefix = f"layers.{index}."
        parts = [_below(piece.tensors, prefix) for piece in pieces]
        if isinstance(layer, CompressedLayer):
            document, joined = _join_layer(rows, parts, layer.counter_names, num_tokens)
        else:
            window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else num_tokens + 1
            document, joined = _join_states(rows[0], parts, num_tokens, window - 1)
        documents.append(Document({"is_filled": True, **document}, f"layers[{index}]"))
        tensors |= {f"{prefix}{name}": tensor for name, tensor in joined.items()}
    snapshot = Snapshot(cache.gear_config, None, None, True, documents, StoredTensors(tensors))
    snapshot.fill(cache.layers, device)
    cache.record.num_blocks = len(pieces)


def _join_layer(
    rows: list[dict[str, Any]], parts: list[dict[str, torch.Tensor]], counter_names: Sequence[str], num_tokens: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if any(len(row["blocks"]) != 1 or ("head" in row) != (row is rows[0]) for row in rows):
        raise ValueError("pieces of a prompt do not follow each other")
    head, blocks = rows[0]["head"], [row["blocks"][0] for row in rows]
    is_rows = "coder" in head
    tensors = {name: tensor for name, tensor in parts[0].items() if not name.startswith("blocks.")}
    if is_rows:
        # Rows of all tokens are one block, to which decoded ones are added
        for side in ("keys", "values"):
            tensors[f"blocks.0.{side}"] = _cat([part.get(f"blocks.0.{side}") for part in parts])
        length = sum(block["length"] for block in blocks)
        blocks = [{"start": blocks[0]["start"], "length": length}]
    else:
        for number, part in enumerate(parts):
            tensors |= {f"blocks.{number}.{name}": each for name, each in _below(part, "blocks.0.").items()}
    num_compressed = sum(block["length"] for block in blocks)
    counters = dict.fromkeys(counter_names, 0) | dict(zip(_COUNTED, (num_compressed, len(rows)), strict=True))
    document = {"type": rows[0]["type"], **head, "length": num_tokens, "counters": counters}
    return document | {"is_open": is_rows, "blocks": blocks}, tensors


def _join_states(
    row: dict[str, Any], parts: list[dict[str, torch.Tensor]], num_tokens: int, most: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Keys and values of the newest tokens, `most` at most."""
    tensors = {}
    for side in ("keys", "values"):
        needed: list[torch.Tensor | None] = []
        count = 0
        for part in reversed(parts):
            if count >= most:
                break
            states = part.get(side)
            needed.insert(0, states)
            count += 0 if states is None or states.dim() != 4 else states.shape[2]
        joined = _cat(needed)
        tensors[side] = joined[:, :, max(joined.shape[2] - most, 0) :]
    return {"type": row["type"], "length": num_tokens}, tensors


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def _cat(states: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """States `[1, heads, tokens, any]` one behind the other."""
    given = [each for each in states if each is not None]
    shapes = {(each.dtype, each.dim(), *each.shape[:2], *each.shape[3:]) for each in given}
    if len(given) < len(states) or len(shapes) != 1 or given[0].dim() != 4:
        raise ValueError("pieces of a prompt are of other shapes than each other")
    return torch.cat(given, dim=2)
