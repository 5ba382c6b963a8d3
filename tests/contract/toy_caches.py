"""Caches that are right and as small as can be: what it takes to keep the contract, and what its own tests break."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.reports.memory import ReportingMixin


BUFFER = 32
"""Recent tokens that `CompressedLayer` keeps exact."""

States = tuple[torch.Tensor, torch.Tensor]


class ModularCache(ReportingMixin, Cache):
    """A cache whose full-attention layers are of a given class, the others Transformers' own."""

    def __init__(self, model: PreTrainedModel, layer_class: type[DynamicLayer] = DynamicLayer) -> None:
        own = DynamicCache(config=model.config).layers
        super().__init__(layers=[layer_class() if type(layer) is DynamicLayer else layer for layer in own])


class CompressedLayer(DynamicLayer):
    """Keeps prompts, and what overflows the buffer, as codes and scales: `history`, of keys and then of values."""

    keys: torch.Tensor  # type: ignore[assignment]
    values: torch.Tensor  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.history: list[torch.Tensor] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        super().update(key_states, value_states)
        states = self.dense()
        if not self.history or self.keys.shape[-2] > BUFFER:
            self.compress()
        return states

    def dense(self) -> States:
        if not self.history:
            return self.keys, self.values
        key_codes, key_scales, value_codes, value_scales = self.history
        keys = torch.cat([key_codes * key_scales, self.keys], dim=-2)
        return keys, torch.cat([value_codes * value_scales, self.values], dim=-2)

    def compress(self) -> None:
        new = [*self.quantize(self.keys), *self.quantize(self.values)]
        old = self.history or [tensor[..., :0, :] for tensor in new]
        self.history = [torch.cat(pair, dim=-2) for pair in zip(old, new, strict=True)]
        self.map_recent(lambda tensor: tensor[..., :0, :])

    def quantize(self, states: torch.Tensor) -> States:
        scales = self.amplitude(states).clamp(min=1e-4) / 7
        return (states / scales).round().to(torch.int8), scales

    def amplitude(self, states: torch.Tensor) -> torch.Tensor:
        return states.abs().amax(dim=-1, keepdim=True)

    def history_length(self) -> int:
        return self.history[0].shape[-2] if self.history else 0

    def get_seq_length(self) -> int:
        return self.history_length() + (self.keys.shape[-2] if self.is_initialized else 0)

    def reset(self) -> None:
        super().reset()
        self.history = []

    def crop(self, tokens_to_remove: int) -> None:
        length = self.history_length()
        beyond = min(0, self.get_seq_length() - length + tokens_to_remove)
        super().crop(tokens_to_remove - beyond)
        self.history = [tensor[..., : length + beyond, :] for tensor in self.history]

    def map_recent(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.keys, self.values = function(self.keys), function(self.values)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_recent(lambda tensor: tensor[indices])
        self.history = [tensor[indices] for tensor in self.history]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))


class SavableCache(ModularCache):
    """A cache of compressed layers that can be saved."""

    layers: list[CompressedLayer]  # type: ignore[assignment]

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, CompressedLayer)

    def save(self, path: Path, model: PreTrainedModel) -> None:
        """Writes all tensors by layer and part."""
        tensors = {}
        layers: list[Any] = list(self.layers)
        for index, layer in enumerate(layers):
            for part, tensor in enumerate([layer.keys, layer.values, *layer.history]):
                tensors[f"{index}.{part}"] = tensor.contiguous()
        save_file(tensors, path)

    @classmethod
    def load(cls, path: Path, model: PreTrainedModel) -> Cache:
        """Reads what `save` wrote."""
        cache, tensors = cls(model), load_file(path)
        layers: list[Any] = list(cache.layers)
        for index, layer in enumerate(layers):
            layer.lazy_initialization(tensors[f"{index}.0"], tensors[f"{index}.1"])
            layer.keys, layer.values, *layer.history = (tensors[f"{index}.{part}"] for part in range(6))
        return cache
