"""What a block of a prompt is called: a digest of all that its bytes depend on.

    root   = digest of the model, the options of the cache and the length of blocks
    key[0] = digest of root and the first tokens
    key[n] = digest of key[n - 1] and the tokens of block n

So two prompts have the same name for a block if, and only if, they are equal up to its end; and whoever has a name has
those of all blocks before it.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b

import torch
from transformers import PreTrainedModel

from kvcache_plugins.gear import GEARCache
from kvcache_plugins.gear.config import GEARConfig
from kvcache_plugins.gear.transform.config import TransformConfig
from kvcache_plugins.models.fingerprint import fingerprint


# Counted up whenever the same tokens would be stored as other bytes
_VERSION = 1
_DIGEST_BYTES = 32
KEY_CHARACTERS = 2 * _DIGEST_BYTES
# Decoded tokens that wait times this: what is longer is compressed as a prompt, at once
_PROMPT_FACTOR = 4


def block_length(config: GEARConfig | TransformConfig, least: int) -> int:
    """
    Tokens of a block under the options of a cache: `least`, or as many more as it takes for a block to be compressed
    as a prompt and to be whole groups, so that nothing of it waits for the next one.
    """
    least = max(least, config.shortest_prompt, _PROMPT_FACTOR * config.residual_length)
    group = config.token_group if isinstance(config, GEARConfig) else 1
    return -(-least // group) * group


def root_key(model: PreTrainedModel, cache: GEARCache, length: int) -> str:
    """What all prompts of a model begin with, under the options of a cache, in blocks of `length` tokens."""
    # Attention that the cache does not compute shows it no queries, of which tables are made
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    facts = [_VERSION, fingerprint(model), cache.gear_config.to_options(), length, attention]
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def next_key(previous: str, token_ids: Sequence[int]) -> str:
    """The name of a block that follows the one named `previous`, or the root."""
    tokens = torch.tensor(token_ids, dtype=torch.int64).numpy().astype("<i8").tobytes()
    return blake2b(bytes.fromhex(previous) + tokens, digest_size=_DIGEST_BYTES).hexdigest()


def block_keys(root: str, token_ids: Sequence[int], length: int) -> list[str]:
    """The names of all whole blocks of a prompt."""
    keys = [root]
    for start in range(0, len(token_ids) - length + 1, length):
        keys.append(next_key(keys[-1], token_ids[start : start + length]))
    return keys[1:]
