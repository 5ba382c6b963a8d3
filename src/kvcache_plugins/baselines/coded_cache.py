"""`CodedTokensCache`: layers that code every token by itself, beside Transformers' own for bounded ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedConfig

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.model_match import ModelMatchMixin
from kvcache_plugins.layers.packing import RowPacking
from kvcache_plugins.registry import get_config
from kvcache_plugins.reports.memory import ReportingMixin


class CodedTokensCache(ModelMatchMixin, ReportingMixin, Cache):
    """
    The base of caches that differ in nothing but how a token becomes bytes.

    Args:
        make_codec (`Callable`):
            Called with the head dims of keys and values; returns what codes them.
        config (`PreTrainedConfig` or `PreTrainedModel`, *optional*):
            The model, or its config. With it, sliding-window and other bounded layers stay Transformers' own; without
            it, every layer is coded.
    """

    def __init__(self, make_codec: Callable[[int, int], Codec], config: PreTrainedConfig | torch.nn.Module | None):
        self._packing = RowPacking(make_codec)
        self._init_layers(get_config(config, "config"))

    def _layer(self, layer_idx: int) -> CompressedLayer:
        return CompressedLayer(self._packing, layer_idx)

    def stats(self) -> dict[str, int]:
        """
        Counters over all coded layers, 0 if there are none.

        Returns:
            `dict[str, int]`: `num_layers` and, of those, `layers_compressing` that hold coded tokens; `tokens_cached`
            (tokens of the sequence); and, summed over layers, `tokens_exact`, `tokens_compressed` (each token once,
            however many items the batch has), `attend_calls` (attentions over coded tokens), `prompts_without_mask`
            and `dense_reads` (times a side of a layer was made dense for something other than attention).
        """
        layers = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        total: Counter[str] = Counter()
        # Of a new layer all are 0: the names are the same where a model has no layer that is ours
        for layer in layers or [self._layer(0)]:
            total.update(layer.stats())
        total["tokens_cached"] = max((layer.get_seq_length() for layer in layers), default=0)
        compressing = sum(bool(layer.blocks) for layer in layers)
        return {"num_layers": len(self.layers), "layers_compressing": compressing, **total}
