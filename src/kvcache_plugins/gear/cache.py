"""`GEARCache`: quantized backbone, low-rank correction and sparse outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.files.records import Format
from kvcache_plugins.kernels.engine import has_gpu_kernels
from kvcache_plugins.layers.group_layer import GroupLayer
from kvcache_plugins.layers.layer_factory import replace_full_attention
from kvcache_plugins.layers.static_group_layer import StaticGroupLayer
from kvcache_plugins.models.layer_config import head_dims
from kvcache_plugins.option_checks import split_nbits
from kvcache_plugins.packed.cache import ADVICE, PackedCache
from kvcache_plugins.packed.snapshot import Snapshot
from kvcache_plugins.packed.warm_up import warm_up_for_prompt
from kvcache_plugins.registry import get_config

from .config import DEFAULT_DECODE_RANK, DEFAULT_NBITS, GEARConfig


@dataclass(frozen=True, eq=False, kw_only=True)
class GEARSnapshot(Snapshot):
    """Content of a file of a `GEARCache`."""

    config: GEARConfig


class GEARCache(PackedCache):
    """
    A cache that stores keys and values in GEAR's form: codes of few bits, a low-rank correction of their error, and
    sparse outliers, all packed in memory.

    Implements [GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of
    LLM](https://huggingface.co/papers/2403.05527). A prompt is compressed right after its attention, decoded tokens
    in chunks of `residual_length`, and no token twice. Attention of `sdpa`, `eager`, `flex_attention` and flash
    attention is computed over compressed tokens; any other implementation makes them dense, one layer at a time. Codes
    are `uint8`; scales, zeros, factors and outliers are float16. [`TransformCodingCache`] needs fewer bytes for the
    same loss.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*):
            The model, or its config. With it, bounded layers (sliding windows, chunks, recurrence) stay Transformers'
            own; without it, every layer is compressed as one of full attention.
        nbits (`int`, *optional*, defaults to 4):
            Bits of a code: 2, 3, 4 or 8.
        key_nbits, value_nbits (`int`, *optional*):
            The same for keys or values alone.
        backbone (`str`, *optional*):
            Grouping of values under one scale: `"kcvt"` (keys by channel, values by token), `"kivi"` (the same, in
            groups of `q_group_size`) or `"per-token"` (both by token, in groups). Defaults to `"kcvt"` at 4 bits and
            more and to `"kivi"` below.
        q_group_size (`int`, *optional*):
            Group of the `kivi` and `per-token` backbones, and the shortest prompt that is compressed. Defaults to the
            largest divisor of the head dimension (values) and of `residual_length` (keys) that is at most 64.
        residual_length (`int`, *optional*, defaults to 64):
            Decoded tokens that stay exact until they are compressed as one chunk: the paper's buffer, `n_b`.
        sparsity (`float`, *optional*, defaults to 0.02):
            Share `s` of the values that are stored as outliers, half of them the largest and half the smallest, of a
            channel of keys or a token of values. 0 is GEAR-L.
        rank (`int`, *optional*, defaults to 4):
            Rank `r_p` of the prompt's low-rank correction, per head. 0 is no correction.
        decode_rank (`int`, *optional*):
            Rank `r_g` of decoded chunks. Defaults to the smaller of 2 and `rank`.
        num_iterations (`int`, *optional*, defaults to 3):
            Power iterations `L` that find the low-rank correction, at most 1000.
        num_sink_tokens (`int`, *optional*, defaults to 0):
            First tokens of a sequence that stay exact, as most heads attend to them and their keys and values are
            unlike all others ([StreamingLLM](https://huggingface.co/papers/2309.17453)).
        rotate_values (`bool`, *optional*, defaults to `False`):
            Rotate values by a Hadamard matrix before they are compressed, which equalizes their channels.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            Padding of the prompt, needed for batches of unequal length under an attention implementation that reads
            dense states, such as one of your own.
        max_cache_len (`int`, *optional*):
            Tokens that memory is reserved for. The cache is then static, like Transformers' `StaticCache`: all steps
            of one token are the same, so `torch.compile` makes one graph of them, on a GPU a CUDA graph, and
            `generate` compiles steps there without being asked. All layers have to be of full attention.

    Raises:
        ValueError: if an option is out of range, or `config` has layers that hold full-length states of a kind that
            cannot be compressed.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from kvcache_plugins import GEARCache

    >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    >>> inputs = tokenizer("A very long text ...", return_tensors="pt")

    >>> cache = GEARCache(model)
    >>> outputs = model.generate(**inputs, past_key_values=cache)
    >>> cache.memory().kv_percent  # of a 16-bit cache
    ```
    """

    # Files of version 7 may be of transform coding
    _format = Format("kvcache_plugins.gear", 8, ADVICE)
    _snapshot_class = GEARSnapshot
    cache_config: GEARConfig

    def __init__(
        self,
        config: PreTrainedConfig | torch.nn.Module | None = None,
        *,
        nbits: int | None = None,
        key_nbits: int | None = None,
        value_nbits: int | None = None,
        backbone: str | None = None,
        q_group_size: int | None = None,
        residual_length: int = 64,
        sparsity: float = 0.02,
        rank: int = 4,
        decode_rank: int | None = None,
        num_iterations: int = 3,
        num_sink_tokens: int = 0,
        rotate_values: bool = False,
        attention_mask: torch.Tensor | None = None,
        max_cache_len: int | None = None,
    ):
        if decode_rank is None:
            decode_rank = min(DEFAULT_DECODE_RANK, rank) if isinstance(rank, int) else rank
        key_nbits, value_nbits = split_nbits(nbits, key_nbits, value_nbits, DEFAULT_NBITS)
        self.cache_config = GEARConfig(
            key_nbits=key_nbits,
            value_nbits=value_nbits,
            backbone=backbone,
            q_group_size=q_group_size,
            residual_length=residual_length,
            sparsity=sparsity,
            rank=rank,
            decode_rank=decode_rank,
            num_iterations=num_iterations,
            num_sink_tokens=num_sink_tokens,
            rotate_values=rotate_values,
        )
        super().__init__(get_config(config, "config"), attention_mask, max_cache_len)

    def _make_empty_layer(self, layer_idx: int) -> GroupLayer:
        return GroupLayer(self.cache_config.policy(), layer_idx, self._given_mask)

    def _layer(self, layer_idx: int, config: PreTrainedConfig | None = None) -> GroupLayer:
        layer: GroupLayer
        if self._max_cache_len or has_gpu_kernels():
            layer = StaticGroupLayer(self.cache_config.policy(), layer_idx, self._given_mask, self._max_cache_len)
        else:
            layer = self._make_empty_layer(layer_idx)
        layer.on_first_prompt = warm_up_for_prompt
        return layer

    def _layers_for(self, config: PreTrainedConfig) -> list[CacheLayerMixin]:
        layers = replace_full_attention(config, self._layer)
        # Raises a `ValueError` if an option does not fit the model's heads
        for head_dim in sorted(head_dims(config)):
            self.cache_config.codec(head_dim, head_dim)
        return layers

    @classmethod
    def _read_options(
        cls, snapshot: Snapshot, model: PreTrainedModel | PreTrainedConfig, given: object
    ) -> dict[str, Any]:
        assert isinstance(snapshot, GEARSnapshot)
        return snapshot.config.to_options()
