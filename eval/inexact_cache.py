"""Dense cache with random errors, as a measure for caches of a given number of bits."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from kvcache_plugins.registry import get_config


# Longest window that stays exact
_SHORT_WINDOW = 64


class InexactCache(DynamicCache):
    """
    Dense cache whose keys and values have random errors like those of a code of some bits, `2 * 2**-nbits` of a
    state's norm. An update returns its own states exact. Codes of Gaussian numbers have errors of at least
    `2**-nbits`; uniform quantization in groups of 64 has 1.8 times as much at 2 bits, 1.5 times at 4.

    Args:
        config (`PreTrainedConfig` or `PreTrainedModel`): the model, or its config.
        key_nbits, value_nbits (`float`): bits of a number of keys and of values.
    """

    def __init__(
        self, config: PreTrainedConfig | torch.nn.Module, *, key_nbits: float = 4.0, value_nbits: float = 4.0
    ):
        super().__init__(config=get_config(config, "config"))
        self._key_error = 2.0 ** (1.0 - key_nbits)
        self._value_error = 2.0 ** (1.0 - value_nbits)
        self._generator = torch.Generator().manual_seed(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        if not layer.is_sliding or layer.sliding_window > _SHORT_WINDOW:
            layer.keys = self._inexact(layer.keys, key_states, self._key_error)
            layer.values = self._inexact(layer.values, value_states, self._value_error)
        return states

    def _inexact(self, kept: torch.Tensor, new: torch.Tensor, error: float) -> torch.Tensor:
        """Return states `[B, H, tokens, D]` with errors in the `new` ones; a window keeps the last."""
        noise = error * torch.randn(new.shape, generator=self._generator, dtype=new.dtype, device=new.device)
        scale = new.pow(2).mean(dim=-1, keepdim=True).sqrt()
        return torch.cat([kept[:, :, : -new.shape[2]], new + noise * scale], dim=2)[:, :, -kept.shape[2] :]
