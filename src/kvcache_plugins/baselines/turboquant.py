"""`TurboQuantCache`: keys and values as rounded coordinates of randomly rotated unit vectors."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.codecs.turboquant import TurboQuantCoder
from kvcache_plugins.option_checks import check_bool, check_choice

from .coded_cache import CodedTokensCache


_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
# One bit is the residual's, and codes have at least one
_WIDTHS_WITH_RESIDUAL = (2, 3, 4, 5, 6)


class TurboQuantCache(CodedTokensCache):
    """
    A cache that stores of every key and value its norm, and its direction after a random rotation, every coordinate
    rounded to the nearest point of a Lloyd-Max codebook.

    Implements [TurboQuant: Online Vector Quantization with Near-optimal Distortion
    Rate](https://huggingface.co/papers/2504.19874), a baseline. It needs no calibration: a coordinate of a rotated
    unit vector has a known distribution. Every token is coded as soon as it comes; only attention over a first prompt
    is exact. The paper's split of channels into some with more bits than others (2.5 and 3.5 bits) is not here.

    The rotation is a constant that all layers, heads and caches share, as are the codebooks: `memory()` does not count
    them.

    See `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own and full-attention layers only are coded; without it, every
            layer.
        nbits (`int`, *optional*, defaults to 4): bits a coordinate, 1 to 6 or 8. A float16 norm for every head's token
            comes on top.
        key_nbits, value_nbits (`int`, *optional*): the same for keys or values alone.
        residual (`bool`, *optional*, defaults to `False`): whether one bit of the keys' goes to signs of a random
            projection of what the codes leave over (the paper's form for inner products): scores are then unbiased,
            and vary more.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            cannot be coded.
    """

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        nbits: int = 4,
        key_nbits: int | None = None,
        value_nbits: int | None = None,
        residual: bool = False,
    ):
        key_nbits, value_nbits = (nbits if own is None else own for own in (key_nbits, value_nbits))
        check_bool("residual", residual)
        check_choice("key_nbits/nbits", key_nbits, _WIDTHS_WITH_RESIDUAL if residual else _WIDTHS)
        check_choice("value_nbits/nbits", value_nbits, _WIDTHS)
        super().__init__(partial(_make_codec, key_nbits, value_nbits, residual), config)


def _make_codec(key_nbits: int, value_nbits: int, residual: bool, key_dim: int, value_dim: int) -> TokenCodec:
    return TokenCodec(TurboQuantCoder(key_dim, key_nbits, residual), TurboQuantCoder(value_dim, value_nbits))
