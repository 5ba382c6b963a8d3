"""`LlamaCppCache`: keys and values in the types that llama.cpp has for its cache."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.codecs.llamacpp import BLOCK_TYPES, BlockCoder, rotation_of
from kvcache_plugins.option_checks import check_bool, check_choice

from .coded_cache import CodedTokensCache


class LlamaCppCache(CodedTokensCache):
    """
    A cache that stores keys and values as [llama.cpp](https://github.com/ggml-org/llama.cpp) does with
    `--cache-type-k` and `--cache-type-v`: blocks of 32 channels of a token that share a float16 scale and, in the
    types that end in 1, a minimum.

    A baseline: the bytes are those that llama.cpp stores, the arithmetic of attention is PyTorch's. Every token is
    coded as soon as it comes; only attention over a first prompt is exact here, where llama.cpp reads its prompt
    as stored too.

    See `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own and full-attention layers only are coded; without it, every
            layer.
        type (`str`, *optional*, defaults to `"q8_0"`): `"q8_0"`, `"q5_1"`, `"q5_0"`, `"q4_1"` or `"q4_0"`.
        key_type, value_type (`str`, *optional*): the same for keys or values alone.
        rotate (`bool`, *optional*, defaults to `True`): whether keys and values are rotated by a Hadamard matrix
            first, as llama.cpp does since April 2026 where heads have a multiple of 64 channels
            (`LLAMA_ATTN_ROT_DISABLE=1` turns it off there).

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            cannot be coded.
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        type: str = "q8_0",
        key_type: str | None = None,
        value_type: str | None = None,
        rotate: bool = True,
    ):
        key_type, value_type = (type if own is None else own for own in (key_type, value_type))
        check_choice("key_type/type", key_type, tuple(BLOCK_TYPES))
        check_choice("value_type/type", value_type, tuple(BLOCK_TYPES))
        check_bool("rotate", rotate)
        super().__init__(partial(_make_codec, key_type, value_type, rotate), config)


def _make_codec(key_type: str, value_type: str, rotate: bool, key_dim: int, value_dim: int) -> TokenCodec:
    keys, values = (
        BlockCoder(BLOCK_TYPES[name], dim, rotation_of(side, dim) if rotate else 0)
        for side, name, dim in (("keys", key_type, key_dim), ("values", value_type, value_dim))
    )
    return TokenCodec(keys, values)
