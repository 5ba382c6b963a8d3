"""`TurboQuantCache`: keys and values as rounded coordinates of randomly rotated unit vectors."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from .coded_cache import CodedTokensCache
from .turboquant_config import TurboQuantConfig


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
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*):
            The model, or its config. With it, sliding-window and other bounded layers stay Transformers' own and
            full-attention layers only are coded; without it, every layer.
        nbits (`int`, *optional*, defaults to 4):
            Bits a coordinate, 1 to 6 or 8. A float16 norm for every head's token comes on top.
        key_nbits, value_nbits (`int`, *optional*):
            The same for keys or values alone.
        residual (`bool`, *optional*, defaults to `False`):
            Whether one bit of the keys' goes to signs of a random projection of what the codes leave over (the
            paper's form for inner products): scores are then unbiased, and vary more.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            cannot be coded.

    Example:

    ```python
    >>> from kvcache_plugins import create_cache
    >>> cache = create_cache("turboquant-4bit", model)
    >>> model.generate(**inputs, past_key_values=cache)
    ```
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
        self.turboquant_config = TurboQuantConfig(
            key_nbits=nbits if key_nbits is None else key_nbits,
            value_nbits=nbits if value_nbits is None else value_nbits,
            residual=residual,
        )
        super().__init__(self.turboquant_config.codec, config)
