"""SAW-INT4, a baseline: 4-bit codes by token, with keys rotated by a block-diagonal Hadamard matrix."""

from functools import partial

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.row_layer import RowLayer

from .affine_coder import AffineCoder
from .coded_cache import CodedTokensCache


_NBITS = 4


class SawInt4Cache(CodedTokensCache):
    """
    A cache that stores a token's key, rotated by a block-diagonal Hadamard matrix, and its value in 4 bits a channel,
    with a float16 scale and minimum for every 128 channels.

    Implements [SAW-INT4: System-Aware 4-Bit KV-Cache Quantization for Real-World LLM
    Serving](https://huggingface.co/papers/2604.19157), a baseline. Every token is coded at once; only
    attention over the first prompt is exact. See `Cache` for details on common methods that are implemented by all
    cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own; without it, every layer is coded.

    Raises:
        ValueError: if `config` has layers that hold full-length states of a kind that cannot be coded.
    """

    def __init__(self, config: PreTrainedConfig | torch.nn.Module | None = None):
        super().__init__(partial(RowLayer, RowPolicy(_make_codec)), config)


def _make_codec(key_dim: int, value_dim: int) -> TokenCodec:
    return TokenCodec(AffineCoder(key_dim, _NBITS, is_rotated=True), AffineCoder(value_dim, _NBITS))
