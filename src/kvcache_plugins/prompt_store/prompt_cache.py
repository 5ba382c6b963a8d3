"""Caches that hold a prompt in blocks: how blocks are cut out of a cache, and how a cache is made of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvcache_plugins.codecs.codec import CodecState
from kvcache_plugins.gear import GEARCache
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.layer_factory import attention_class
from kvcache_plugins.layers.layer_state import DenseState, LayerState, SegmentState, State
from kvcache_plugins.layers.recurrent_state import RecurrentStates, recurrent_states
from kvcache_plugins.layers.segments import ROWS
from kvcache_plugins.packed.cache import PackedCache
from kvcache_plugins.packed.snapshot import PACKED_CLASSES, check_number, restore_layers, state_of
from kvcache_plugins.transform_coding import TransformCodingCache

from .blocks import PromptBlock
from .folder import Lease


# Keys and values of these can be cut
_KNOWN_CLASSES = (*PACKED_CLASSES, DynamicLayer, DynamicSlidingWindowLayer)
# These replace states of earlier tokens
_REPLACING_CLASSES = (DynamicSlidingWindowLayer, LinearAttentionLayer)


class BlockEnd(NamedTuple):
    """
    States at a block's end that later tokens replace.

    Attributes:
        windows (`dict`): by layer, the tokens that a layer of a sliding window holds.
        recurrent (`list`, *optional*): states of recurrences, if the model has any.
    """

    windows: dict[int, DenseState]
    recurrent: RecurrentStates


class BlockRecord:
    """
    Record of the blocks that a cache was filled with, one forward each.

    Attributes:
        length (`int`): tokens of a block; 0 if blocks are not recorded.
        num_blocks (`int`): blocks from the first token on.
        is_needed (`bool`): True if layers replace states, so that a block can be cut at its end alone.
        ends (`dict`): `BlockEnd` by block.
        store (`object`): store that made the cache.
        root (`str`): key of the root of its prompts.
        lease (`Lease`, *optional*): lease on the blocks that were loaded.
    """

    def __init__(self) -> None:
        self.length = 0
        self.num_blocks = 0
        self.is_needed = False
        self.ends: dict[int, BlockEnd] = {}
        self.store: object = None
        self.root = ""
        self.lease: Lease | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> BlockRecord:
        # A copy continues a prompt, and does not keep its blocks a second time
        return BlockRecord()

    def count_block(self, held: int, count: int) -> None:
        """Record an update by `count` tokens of a cache that holds `held`."""
        if not self.length:
            return
        self.num_blocks = min(self.num_blocks, held // self.length)
        if held == self.num_blocks * self.length and count == self.length:
            self.num_blocks += 1

    def record_end(self, layers: Sequence[CacheLayerMixin], held: int) -> None:
        """Record what the next forward replaces, if a block ends here."""
        if not self.is_needed or not self.num_blocks or held != self.num_blocks * self.length:
            return
        # Tensors of windows are replaced, never written to
        windows = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.values is not None:
                newest = slice(-min(self.length, layer.sliding_window - 1), None)
                windows[index] = DenseState(held, layer.keys[:, :, newest], layer.values[:, :, newest])
        recurrent = recurrent_states(layers, held)
        copies = None if recurrent is None else [None if state is None else state.clone() for state in recurrent]
        self.ends[self.num_blocks - 1] = BlockEnd(windows, copies)


class PromptCache(PackedCache):
    """
    Base of caches that hold a prompt in blocks.

    Raises a `ValueError` for a model whose layers keep states in a form of their own.

    Attributes:
        record (`BlockRecord`): blocks that the cache was filled with.
    """

    # First call of every forward: name of the method, and its layer and number of the state
    _opening: tuple[str, int, int] | None = None

    def __init__(self, model: PreTrainedModel, **options: object) -> None:
        self.record = BlockRecord()
        self.model_name = str(model.config.name_or_path)
        super().__init__(model, **options)  # type: ignore[arg-type, call-arg]
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CacheLayerMixin) and attention_class(layer) not in _KNOWN_CLASSES:
                raise ValueError(
                    f"`model`: layer {index} has states of another kind than keys, values and recurrences "
                    f"(`{type(layer).__name__}`), so that blocks of a prompt cannot be kept"
                )
        self.record.is_needed = any(isinstance(layer, _REPLACING_CLASSES) for layer in self.layers)

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._note_call("update", layer_idx)
        if layer_idx == self._first_layer:
            self.record.count_block(self.get_seq_length(), key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._note_call("update_conv_state", layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._note_call("update_recurrent_state", layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _note_call(self, name: str, layer_idx: int, state_idx: int = 0) -> None:
        """Record the end of a block before the first call of the next forward."""
        call = name, layer_idx, state_idx
        self._opening = self._opening or call
        if call == self._opening:
            self.record.record_end(self.layers, self.get_seq_length())

    def cut(self, keys: Sequence[str], numbers: Sequence[int], token_ids: Sequence[int]) -> dict[int, PromptBlock]:
        """
        Cut blocks out of the cache, as views where possible; a `ValueError` if it was not filled with such blocks. Any
        uncommitted prompt is committed.

        Args:
            keys (`Sequence[str]`): keys of the root and of all blocks.
            numbers (`Sequence[int]`): numbers of the blocks to cut.
            token_ids (`Sequence[int]`): the prompt.
        """
        self._commit_prompts()
        states = [state_of(layer, index) for index, layer in enumerate(self.layers)]
        options = {"class": type(self).__name__, **stored_options(self)}
        length = self.record.length
        blocks = {}
        for number in numbers:
            tokens = slice(number * length, (number + 1) * length)
            end = self.record.ends.get(number, BlockEnd({}, None))
            layers: list[State] = []
            for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
                if isinstance(layer, CacheLayerMixin):
                    layers.append(end.windows.get(index) or _cut(state, index, tokens))
                else:
                    layers.append(None)
            blocks[number] = PromptBlock(
                previous=keys[number],
                start=tokens.start,
                token_ids=list(token_ids[tokens]),
                model_name=self.model_name,
                options=options,
                layers=layers,
                recurrent=end.recurrent,
            )
        return blocks

    def fill(self, blocks: Sequence[PromptBlock], device: torch.device) -> None:
        """Fill the empty cache with consecutive blocks from the first on; a `ValueError` if they do not fit it."""
        for block in blocks:
            check_number(block.layers, len(self.layers), is_exact=True)
        num_tokens = len(blocks) * self.record.length
        states = [
            _join_layer(layer, index, [block.layers[index] for block in blocks], num_tokens)
            for index, layer in enumerate(self.layers)
        ]
        restore_layers(self.layers, states, blocks[-1].recurrent, device)
        self.record.num_blocks = len(blocks)


class GEARPromptCache(PromptCache, GEARCache):
    """A `GEARCache` that holds a prompt in blocks."""


class TransformCodingPromptCache(PromptCache, TransformCodingCache):
    """A `TransformCodingCache` that holds a prompt in blocks."""


def stored_options(cache: PackedCache) -> dict[str, object]:
    """Return the options that decide on the bytes of a cache, among them the digest of a calibration."""
    calibration = cache.calibration if isinstance(cache, TransformCodingCache) else None
    options = cache.cache_config.to_options()
    return options if calibration is None else {**options, "calibration": calibration.digest}


def _cut(state: State, index: int, tokens: slice) -> LayerState | DenseState:
    """
    Return the state of a layer with `tokens` alone; with the first ones, exact tokens in front too, and tables with
    the first that are read by them.
    """
    if isinstance(state, DenseState):
        if state.keys.shape[2] < state.length:
            raise ValueError("a sliding window has evicted tokens that it held at a block's end")
        return DenseState(tokens.stop, state.keys[:, :, tokens], state.values[:, :, tokens])
    if state is None:
        raise ValueError(f"layer {index} holds nothing")
    is_unfitted = state.tables is None and state.moments is not None
    if state.batch_size != 1 or is_unfitted or state.padding is not None or state.pending is not None:
        raise ValueError(f"layer {index} holds no prompt alone and without padding")
    block = _find_block(state.blocks, tokens)
    if block is None:
        raise ValueError(f"layer {index} has not compressed tokens {tokens.start} to {tokens.stop} together")
    is_first = tokens.start == 0
    # Tables are in the first block whose rows are read by them; a fork ends a segment, too
    starts = [each.start for number, each in enumerate(state.blocks) if not number or _has_new_tables(state, number)]
    starts_tables = block.start in starts
    return dataclasses.replace(
        state,
        length=tokens.stop,
        is_open=False,
        counters={},
        prefix=state.prefix if is_first else None,
        blocks=[dataclasses.replace(block, tables=None)],
        buffer=None,
        # Queries of decoded tokens are no part of the prompt
        moments=None,
        tables=(block.tables or state.tables) if starts_tables else None,
    )


def _has_new_tables(state: LayerState, number: int) -> bool:
    """Return true if compressed tokens, by number, are read by other tables than those before them."""
    before, own = state.blocks[number - 1].tables, state.blocks[number].tables
    if before is None or own is None:
        return before is not own
    return before.keys["widths"] is not own.keys["widths"]


def _find_block(blocks: Sequence[SegmentState], tokens: slice) -> SegmentState | None:
    """Return a block of `tokens` alone, less the exact ones in front of all blocks; `None` if there is none."""
    for number, block in enumerate(blocks):
        stop = block.start + block.length
        start = block.start if number == 0 and tokens.start == 0 else tokens.start
        if start < block.start:
            return None
        if ROWS in block.keys:
            if start < tokens.stop <= stop and not block.is_recent:
                rows = slice(start - block.start, tokens.stop - block.start)
                keys, values = block.keys[ROWS][:, :, rows], block.values[ROWS][:, :, rows]
                return SegmentState(start, tokens.stop - start, {ROWS: keys}, {ROWS: values}, tables=block.tables)
        # Tokens in groups belong together: the block has to be one chunk of these tokens
        elif (block.start, stop) == (start, tokens.stop) and len(block.keys["codes"][0, 0]) == 1:
            return block
    return None


def _join_layer(layer: CacheLayerMixin, index: int, states: Sequence[State], num_tokens: int) -> State:
    """Join the states of a layer in consecutive blocks."""
    compressed = [state for state in states if isinstance(state, LayerState)]
    if isinstance(layer, CompressedLayer) and len(compressed) == len(states):
        return _join_compressed(compressed, num_tokens, layer.counter_names)
    dense = [state for state in states if isinstance(state, DenseState)]
    if isinstance(layer, DynamicLayer) and len(dense) == len(states):
        most = layer.sliding_window - 1 if isinstance(layer, DynamicSlidingWindowLayer) else num_tokens
        return _join_dense(dense, num_tokens, most)
    if isinstance(layer, CacheLayerMixin):
        raise ValueError(f"there are no such states of layer {index}")
    return None


def _join_compressed(states: Sequence[LayerState], num_tokens: int, counter_names: Sequence[str]) -> LayerState:
    has_more = any(state.prefix is not None for state in states[1:])
    is_single = all(len(state.blocks) == 1 and not state.blocks[0].is_recent for state in states)
    if has_more or not is_single:
        raise ValueError("blocks of a prompt do not follow each other")
    blocks = [state.blocks[0] for state in states]
    num_compressed = sum(block.length for block in blocks)
    is_rows = all(ROWS in block.keys for block in blocks)
    tables = states[0].tables
    if is_rows:
        blocks, tables = _join_rows(states)
    counters = dict.fromkeys(counter_names, 0)
    counters |= {"tokens_compressed": num_compressed, "chunks_compressed": len(states)}
    return dataclasses.replace(
        states[0], length=num_tokens, is_open=is_rows, counters=counters, blocks=blocks, tables=tables
    )


def _join_rows(states: Sequence[LayerState]) -> tuple[list[SegmentState], CodecState | None]:
    """Join rows that are read by the same tables into one block each; return these and the tables of the last."""
    starts = [number for number, state in enumerate(states) if number == 0 or state.tables is not None]
    joined = []
    for first, stop in pairwise([*starts, len(states)]):
        blocks = [state.blocks[0] for state in states[first:stop]]
        keys = _concatenate([block.keys[ROWS] for block in blocks])
        values = _concatenate([block.values[ROWS] for block in blocks])
        own = None if stop == len(states) else states[first].tables
        joined.append(SegmentState(blocks[0].start, keys.shape[2], {ROWS: keys}, {ROWS: values}, tables=own))
    return joined, states[starts[-1]].tables


def _join_dense(states: Sequence[DenseState], num_tokens: int, most: int) -> DenseState:
    """Join dense states, and keep the newest `most` tokens."""
    first = len(states) - 1
    while first > 0 and sum(state.keys.shape[2] for state in states[first:]) < most:
        first -= 1
    keys = _concatenate([state.keys for state in states[first:]])
    values = _concatenate([state.values for state in states[first:]])
    return DenseState(num_tokens, keys[:, :, -most:], values[:, :, -most:])


def _concatenate(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the tokens of states from files; a `ValueError` if one is of another shape."""
    shapes = {(each.dtype, each.dim(), *each.shape[:2], *each.shape[3:]) for each in states}
    if len(shapes) != 1 or states[0].dim() != 4:
        raise ValueError("blocks of a prompt are of other shapes than each other")
    return torch.cat(list(states), dim=2)
