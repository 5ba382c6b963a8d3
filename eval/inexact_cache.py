"""A dense cache with random errors, to which caches that lose as much are compared."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from kvcache_plugins.registry import get_config


# Windows that caches leave to Transformers
_SHORT_WINDOW = 64


class InexactCache(DynamicCache):
    """
    A dense cache of keys and values that err as if they were coded in so many bits each, from the update after their
    own on: by random errors, `2 * 2**-nbits` of a state's norm. No code of Gaussian numbers errs by less than
    `2**-nbits`; those in the steps of a range err by 1.8 times as much with 2 bits and groups of 64, by 1.5 with 4.

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
        """Return states `[B, H, tokens, D]` with errors in the `new` ones, which are the last."""
        noise = error * torch.randn(new.shape, generator=self._generator, dtype=new.dtype, device=new.device)
        scale = new.pow(2).mean(dim=-1, keepdim=True).sqrt()
        return torch.cat([kept[:, :, : -new.shape[2]], new + noise * scale], dim=2)
