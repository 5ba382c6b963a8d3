"""Blocks of a prompt: what they are called, how they are cut out of a cache, as files, and as a cache again.

    root   = digest of the model, the options of the cache and the length of blocks
    key[0] = digest of root and the first tokens
    key[n] = digest of key[n - 1] and the tokens of block n

So two prompts have the same name for a block if, and only if, they are equal up to its end; and whoever has a name has
those of all blocks before it.

A block has the state of every layer (`layers.layer_state`), of its tokens alone. What comes with the first tokens
(exact ones in front, tables) is in the first block. Layers of sliding windows, which forget, have the tokens that the
block's end can still see.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.files.atomic import RefusedFile, refusals
from kvcache_plugins.files.records import Format, read_record
from kvcache_plugins.files.schema import pack
from kvcache_plugins.gear import GEARCache
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.layer_factory import holds_nothing
from kvcache_plugins.layers.layer_state import DenseState, LayerState, SegmentState, State
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.layers.segments import ROWS
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.packed.cache import CacheConfig, PackedCache
from kvcache_plugins.packed.snapshot import check_number, restore_layers, state_of
from kvcache_plugins.transform_coding import TransformCodingCache

from .folder import Lease


FORMAT = Format("kvcache_plugins.prompt_block", 4, "the prompt is read again")
# Counted up whenever the same tokens would be stored as other bytes
_VERSION = 1
_DIGEST_BYTES = 32
# Decoded tokens that wait times this: what is longer is compressed as a prompt, at once
_PROMPT_FACTOR = 4
_NO_COUNTERS: dict[str, int] = {}


def block_length(config: CacheConfig, least: int) -> int:
    """Return the fewest tokens from `least` on that are whole groups and are all compressed at once, as a prompt."""
    least = max(least, config.shortest_prompt, _PROMPT_FACTOR * config.residual_length)
    return -(-least // config.token_group) * config.token_group


def prompt_keys(root: str, token_ids: Sequence[int], length: int) -> list[str]:
    """Names the root of a prompt and behind it all its whole blocks: before a block's name stands its previous one."""
    blocks = (token_ids[start : start + length] for start in range(0, len(token_ids) - length + 1, length))
    return list(accumulate(blocks, next_key, initial=root))


def root_key(model: PreTrainedModel, cache: PackedCache, length: int) -> str:
    """Names what all prompts of a model begin with, under the options of a cache, in blocks of `length` tokens."""
    # Attention that the cache does not compute shows it no queries, of which tables are made
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    facts = [_VERSION, fingerprint(model), type(cache).__name__, cache.cache_config.to_options(), length, attention]
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def next_key(previous: str, token_ids: Sequence[int]) -> str:
    """Names the block that follows the one named `previous`, or the root."""
    tokens = torch.tensor(token_ids, dtype=torch.int64, device="cpu").numpy().astype("<i8").tobytes()
    return blake2b(bytes.fromhex(previous) + tokens, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """
    Describes a block: its previous one's or the root's name, start, tokens, model and options. The file's name follows
    from the first three, so a damaged, renamed or foreign file is found out whatever its checksum says.
    """

    previous: str
    start: int
    token_ids: list[int]
    model_name: str
    options: dict[str, object]


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptBlock(BlockHeader):
    """A block as a file has it: with the state of every layer, of the block's tokens alone."""

    layers: list[State]

    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in pack(self)[1].values())


def read_block(path: Path) -> PromptBlock:
    """Reads the block in a file; one that is damaged, of another version, or another block's is a `ValueError`."""
    with refusals("folder", path):
        block = read_record(path, FORMAT, PromptBlock)
        is_name = len(block.previous) == 2 * _DIGEST_BYTES and set(block.previous) <= set("0123456789abcdef")
        if not is_name or next_key(block.previous, block.token_ids) != path.stem:
            raise RefusedFile("holds another block than its name says")
    return block


class BlockRecord:
    """
    Records the `num_blocks` blocks of `length` tokens that a cache was fed one by one, and by block and layer the
    `windows` that sliding layers held at their ends; `store`, `root` and `lease` are of who made the cache.
    """

    def __init__(self, length: int = 0):
        self.length, self.num_blocks = length, 0
        self.windows: dict[int, dict[int, DenseState]] = {}
        self.store: object = None
        self.root = ""
        self.lease: Lease | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> BlockRecord:
        # A copy goes on from a prompt, and nobody keeps its blocks anew
        return BlockRecord()

    def before_update(self, layers: list[Any], held: int, count: int) -> None:
        """Notes that `count` tokens follow those `held`, before they do."""
        if not self.length:
            return
        self.note_windows(layers, held)
        self.num_blocks = min(self.num_blocks, held // self.length)
        if held == self.num_blocks * self.length and count == self.length:
            self.num_blocks += 1

    def note_windows(self, layers: list[Any], held: int) -> None:
        """Notes what sliding windows hold, if a block ends here: their tensors are replaced, never written to."""
        if not self.num_blocks or held != self.num_blocks * self.length:
            return
        noted = self.windows[self.num_blocks - 1] = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.values is not None:
                # The newest tokens, that the block's end can still see
                newest = slice(-min(self.length, layer.sliding_window - 1), None)
                noted[index] = DenseState(held, layer.keys[:, :, newest], layer.values[:, :, newest])


class PromptCache(PackedCache):
    """
    Base of caches that hold a prompt in blocks, and a `record` of them; a `ValueError` for layers of more than keys
    and values.
    """

    def __init__(self, model: PreTrainedModel, **options: Any):
        self.record = BlockRecord()
        self.model_name = str(model.config.name_or_path)
        super().__init__(model, **options)  # type: ignore[arg-type, call-arg]
        for index, layer in enumerate(self.layers):
            is_known = type(layer) in (GroupLayer, RowLayer, DynamicLayer, DynamicSlidingWindowLayer)
            if not is_known and not holds_nothing(layer):
                raise ValueError(
                    f"`model`: layer {index} has states of another kind than keys and values "
                    f"(`{type(layer).__name__}`), of which a prompt's blocks cannot be kept"
                )

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == 0:
            self.record.before_update(self.layers, self.get_seq_length(), key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def cut(self, keys: Sequence[str], numbers: Sequence[int], token_ids: Sequence[int]) -> dict[int, PromptBlock]:
        """Cut blocks of a prompt out by number, as views where possible; a `ValueError` if it was not fed them."""
        states = [state_of(layer, index) for index, layer in enumerate(self.layers)]
        length, blocks = self.record.length, {}
        options = {"class": type(self).__name__, **self.cache_config.to_options()}
        for number in numbers:
            tokens, windows = slice(number * length, (number + 1) * length), self.record.windows.get(number, {})
            layers = [
                None if holds_nothing(layer) else windows.get(index) or _cut(state, index, tokens)
                for index, (layer, state) in enumerate(zip(self.layers, states, strict=True))
            ]
            blocks[number] = PromptBlock(
                previous=keys[number],
                start=tokens.start,
                token_ids=list(token_ids[tokens]),
                model_name=self.model_name,
                options=options,
                layers=layers,
            )
        return blocks

    def fill(self, blocks: Sequence[PromptBlock], device: torch.device) -> None:
        """
        Takes over consecutive blocks from the first on, while empty; a `ValueError` if no such cache can be like that.
        """
        num_tokens, states = len(blocks) * self.record.length, list[State]()
        for block in blocks:
            check_number(block.layers, len(self.layers), is_exact=True)
        for index, layer in enumerate(self.layers):
            own = [block.layers[index] for block in blocks]
            compressed = [state for state in own if isinstance(state, LayerState)]
            dense = [state for state in own if isinstance(state, DenseState)]
            joined: State = None
            if isinstance(layer, CompressedLayer) and len(compressed) == len(blocks):
                joined = _join(compressed, num_tokens, layer.counter_names)
            elif isinstance(layer, DynamicLayer) and len(dense) == len(blocks):
                window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else num_tokens + 1
                joined = _join_dense(dense, num_tokens, window - 1)
            if joined is None and not holds_nothing(layer):
                raise ValueError(f"there are no such states of layer {index}")
            states.append(joined)
        restore_layers(self.layers, states, device)
        self.record.num_blocks = len(blocks)


class GEARPromptCache(PromptCache, GEARCache):
    """A `GEARCache` that holds a prompt in blocks."""


class TransformCodingPromptCache(PromptCache, TransformCodingCache):
    """A `TransformCodingCache` that holds a prompt in blocks."""


def _cut(state: LayerState | DenseState | None, index: int, tokens: slice) -> LayerState | DenseState:
    """The state of a layer that holds some tokens alone, and if they are the first all else that it needs."""
    if isinstance(state, DenseState):
        if state.keys.shape[2] < state.length:
            raise ValueError("a sliding window has forgotten what it held at a block's end")
        return DenseState(tokens.stop, state.keys[:, :, tokens], state.values[:, :, tokens])
    if state is None:
        raise ValueError(f"layer {index} holds nothing")
    if state.batch_size != 1 or any(each is not None for each in (state.padding, state.pending, state.moments)):
        raise ValueError(f"layer {index} holds no prompt alone and without padding")
    is_first = tokens.start == 0
    for number, block in enumerate(state.blocks):
        start, stop = max(tokens.start, block.start), block.start + block.length
        if start > tokens.start and not (is_first and number == 0):
            break
        if ROWS in block.keys and not block.is_recent and start < tokens.stop <= stop:
            # Coded one by one
            rows, count = slice(start - block.start, tokens.stop - block.start), tokens.stop - start
            keys, values = ({ROWS: each[ROWS][:, :, rows]} for each in (block.keys, block.values))
            found = SegmentState(start, count, keys, values)
        elif (
            ROWS not in block.keys
            and (block.start, stop) == (start, tokens.stop)
            and len(block.keys["codes"][0, 0]) == 1
        ):
            # Compressed together, and with no others
            found = block
        else:
            continue
        return dataclasses.replace(
            state,
            length=tokens.stop,
            is_open=False,
            counters=_NO_COUNTERS,
            prefix=state.prefix if is_first else None,
            blocks=[found],
            buffer=None,
            tables=state.tables if is_first else None,
        )
    raise ValueError(f"layer {index} has not compressed tokens {tokens.start} to {tokens.stop} together")


def _join(states: Sequence[LayerState], num_tokens: int, counter_names: Sequence[str]) -> LayerState:
    first, blocks = states[0], [block for state in states for block in state.blocks]
    has_more = any(state.prefix is not None or state.tables is not None for state in states[1:])
    is_single = all(len(state.blocks) == 1 and not state.blocks[0].is_recent for state in states)
    if has_more or not is_single:
        raise ValueError("blocks of a prompt do not follow each other")
    num_compressed, is_rows = sum(block.length for block in blocks), all(ROWS in block.keys for block in blocks)
    if is_rows:
        # Rows of all tokens are one block, to which decoded ones are added
        keys, values = (
            {ROWS: _cat([getattr(block, side).get(ROWS) for block in blocks])} for side in ("keys", "values")
        )
        blocks = [SegmentState(blocks[0].start, num_compressed, keys, values)]
    counters = dict.fromkeys(counter_names, 0) | {"tokens_compressed": num_compressed}
    counters["chunks_compressed"] = len(states)
    return dataclasses.replace(first, length=num_tokens, is_open=is_rows, counters=counters, blocks=blocks)


def _join_dense(states: Sequence[DenseState], num_tokens: int, most: int) -> DenseState:
    first = len(states) - 1
    while first > 0 and sum(state.keys.shape[2] for state in states[first:]) < most:
        first -= 1
    keys, values = (_cat([getattr(state, side) for state in states[first:]]) for side in ("keys", "values"))
    return DenseState(num_tokens, keys[:, :, -most:], values[:, :, -most:])


def _cat(states: Sequence[torch.Tensor | None]) -> torch.Tensor:
    given = [each for each in states if each is not None]
    shapes = {(each.dtype, each.dim(), *each.shape[:2], *each.shape[3:]) for each in given}
    if len(given) < len(states) or len(shapes) != 1 or given[0].dim() != 4:
        raise ValueError("blocks of a prompt are of other shapes than each other")
    return torch.cat(given, dim=2)
