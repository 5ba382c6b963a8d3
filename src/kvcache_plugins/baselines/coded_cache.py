"""Base of caches with one policy for all layers, and the caches of TurboQuant and of llama.cpp's types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import Cache, PreTrainedConfig

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.layers.usage_checks import UsageChecksMixin
from kvcache_plugins.option_checks import check_bool, check_choice
from kvcache_plugins.registry import get_config
from kvcache_plugins.reports.memory import ReportingMixin, add_stats

from .llamacpp import BLOCK_TYPES, BlockCoder, rotation_of
from .turboquant import TurboQuantCoder


_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
# One bit is for the residual, and codes have at least one
_WIDTHS_WITH_RESIDUAL = (2, 3, 4, 5, 6)


class CodedTokensCache(UsageChecksMixin, ReportingMixin, Cache):
    """
    Base of baselines that differ in their layers. With a config, bounded layers are Transformers' own.

    Args:
        make_layer (`Callable`): makes the layer of an index.
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config.
    """

    def __init__(
        self,
        make_layer: Callable[[int], RowLayer | GroupLayer],
        config: PreTrainedConfig | torch.nn.Module | None,
    ):
        self._make_layer = make_layer
        self._init_layers(get_config(config, "config"))

    def _layer(self, layer_idx: int) -> RowLayer | GroupLayer:
        return self._make_layer(layer_idx)

    def stats(self) -> dict[str, int]:
        """
        Return counters over all coded layers; they are 0 if there are none.

        Returns:
            `dict[str, int]`: `num_layers`, and `layers_compressing` with coded tokens; `tokens_cached` (length of the
            sequence); and, summed over layers, `tokens_exact`, `tokens_compressed` (each token once, whatever the
            batch size), `attend_calls` (attentions over coded tokens), `prompts_without_mask` and `dense_reads` (sides
            of a layer that were made dense for something other than attention).
        """
        compressing = sum(isinstance(layer, CompressedLayer) and bool(layer.storage.segments) for layer in self.layers)
        return {**add_stats(self.layers, self._layer), "layers_compressing": compressing}


class TurboQuantCache(CodedTokensCache):
    """
    A cache that stores the norm of every key and value, and the direction after a random rotation, with coordinates in
    Lloyd-Max codes.

    Implements [TurboQuant: Online Vector Quantization with Near-optimal Distortion
    Rate](https://huggingface.co/papers/2504.19874), a baseline. It needs no calibration: a coordinate of a rotated
    unit vector has a known distribution. Every token is coded at once; only attention over the first prompt is exact.
    The paper's channels of different bits (2.5 and 3.5 bits on average) are not implemented.

    `memory()` does not count the rotation and the codebooks, which are constants of all layers, heads and caches.

    See `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own; without it, every layer is coded.
        nbits (`int`, *optional*, defaults to 4): bits of a coordinate, 1 to 6 or 8, beside a float16 norm for every
            token of a head.
        key_nbits, value_nbits (`int`, *optional*): the same for keys or values alone.
        residual (`bool`, *optional*, defaults to `False`): use one of the keys' bits for signs of a random projection
            of the codes' error (the paper's form for inner products). Scores are then unbiased, and vary more.

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
        policy = RowPolicy(partial(_turboquant_codec, key_nbits, value_nbits, residual))
        super().__init__(partial(RowLayer, policy), config)


def _turboquant_codec(key_nbits: int, value_nbits: int, residual: bool, key_dim: int, value_dim: int) -> TokenCodec:
    return TokenCodec(TurboQuantCoder(key_dim, key_nbits, residual), TurboQuantCoder(value_dim, value_nbits))


class LlamaCppCache(CodedTokensCache):
    """
    A cache that stores keys and values like [llama.cpp](https://github.com/ggml-org/llama.cpp) with
    `--cache-type-k` and `--cache-type-v`: blocks of 32 channels of a token that share a float16 scale and, in the
    types that end in 1, a minimum.

    A baseline: the bytes are those of llama.cpp, the arithmetic of attention is PyTorch's. Every token is coded at
    once. Attention over the first prompt is exact, unlike in llama.cpp.

    See `Cache` for details on common methods that are implemented by all cache classes.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model, or its config. With it, sliding-window
            and other bounded layers stay Transformers' own; without it, every layer is coded.
        type (`str`, *optional*, defaults to `"q8_0"`): `"q8_0"`, `"q5_1"`, `"q5_0"`, `"q4_1"` or `"q4_0"`.
        key_type, value_type (`str`, *optional*): the same for keys or values alone.
        rotate (`bool`, *optional*, defaults to `True`): rotate keys and values by a Hadamard matrix first, if heads
            have a multiple of 64 channels; llama.cpp does so since April 2026, without `LLAMA_ATTN_ROT_DISABLE=1`.

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
        check_choice("key_type/type", key_type, BLOCK_TYPES)
        check_choice("value_type/type", value_type, BLOCK_TYPES)
        check_bool("rotate", rotate)
        policy = RowPolicy(partial(_llamacpp_codec, key_type, value_type, rotate))
        super().__init__(partial(RowLayer, policy), config)


def _llamacpp_codec(key_type: str, value_type: str, rotate: bool, key_dim: int, value_dim: int) -> TokenCodec:
    keys, values = (
        BlockCoder(name, dim, rotation_of(side, dim) if rotate else 0)
        for side, name, dim in (("keys", key_type, key_dim), ("values", value_type, value_dim))
    )
    return TokenCodec(keys, values)
