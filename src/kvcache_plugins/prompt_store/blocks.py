"""Blocks of a prompt: their names, and their files.

    root   = digest of the model, the options of the cache and the length of blocks
    key[0] = digest of root and the first tokens
    key[n] = digest of key[n - 1] and the tokens of block n

Two prompts have the same key for a block if, and only if, they are equal up to its end; a key stands for all blocks
before it as well.

A block holds the state of every layer (`layers.layer_state`) for its tokens alone, with tables if its rows are the
first that are read by them. The first block also holds exact tokens in front. Layers of sliding windows, which evict
tokens, hold those that the token after the block can still see, and layers of a recurrence their states after the
block's last token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvcache_plugins.files.atomic import RefusedFile, refusals
from kvcache_plugins.files.records import Format, read_record
from kvcache_plugins.files.schema import pack
from kvcache_plugins.layers.layer_state import State
from kvcache_plugins.layers.recurrent_state import RecurrentStates
from kvcache_plugins.models.fingerprint import fingerprint
from kvcache_plugins.packed.cache import CacheConfig


FORMAT = Format("kvcache_plugins.prompt_block", 4, "the prompt is read again")
# Part of every key; incremented whenever the same tokens would be stored as other bytes
_VERSION = 2
_DIGEST_BYTES = 32
# Updates longer than this many times the decoded tokens that wait are packed at once, as a prompt
_PROMPT_FACTOR = 4


def block_length(config: CacheConfig, least: int) -> int:
    """Return the fewest tokens from `least` on that are whole groups and are all packed at once, as a prompt."""
    least = max(least, config.shortest_prompt, _PROMPT_FACTOR * config.residual_length)
    return -(-least // config.token_group) * config.token_group


def prompt_keys(root: str, token_ids: Sequence[int], length: int) -> list[str]:
    """Return the key of the root of a prompt, and after it those of all whole blocks."""
    blocks = (token_ids[start : start + length] for start in range(0, len(token_ids) - length + 1, length))
    return list(accumulate(blocks, next_key, initial=root))


def root_key(model: PreTrainedModel, kind: str, options: dict[str, object], length: int) -> str:
    """
    Return the key before the first block of every prompt of a model, for caches of a `kind` and `options`, and blocks
    of `length` tokens.
    """
    # Tables are made of queries, which not every attention implementation passes to the cache
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    facts = [_VERSION, fingerprint(model), kind, options, length, attention]
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def next_key(previous: str, token_ids: Sequence[int]) -> str:
    """Return the key of the block after `previous`, the key of a block or of the root."""
    tokens = torch.tensor(token_ids, dtype=torch.int64, device="cpu").numpy().astype("<i8").tobytes()
    return blake2b(bytes.fromhex(previous) + tokens, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, kw_only=True)
class BlockHeader:
    """
    Description of a block. The first three fields determine its key, the name of its file, so that a damaged, renamed
    or foreign file is detected even if its checksum is right.

    Attributes:
        previous (`str`): key of the block before it, or of the root.
        start (`int`): position of its first token.
        token_ids (`list[int]`): its tokens.
        model_name (`str`): name of the model.
        options (`dict`): class and options of the cache.
    """

    previous: str
    start: int
    token_ids: list[int]
    model_name: str
    options: dict[str, object]


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptBlock(BlockHeader):
    """
    A block with the state of every layer, for the block's tokens alone.

    Attributes:
        layers (`list`): keys and values of each layer.
        recurrent (`list`, *optional*): states of recurrences after the block, if the model has any.
    """

    layers: list[State]
    recurrent: RecurrentStates = None

    def num_bytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(tensor.nbytes for tensor in pack(self)[1].values())


def read_block(path: Path) -> PromptBlock:
    """Read the block in a file; raise a `ValueError` for a damaged one, another version, or another block's."""
    with refusals("folder", path):
        block = read_record(path, FORMAT, PromptBlock)
        is_key = len(block.previous) == 2 * _DIGEST_BYTES and set(block.previous) <= set("0123456789abcdef")
        if not is_key or next_key(block.previous, block.token_ids) != path.stem:
            raise RefusedFile("holds another block than its name says")
    return block
