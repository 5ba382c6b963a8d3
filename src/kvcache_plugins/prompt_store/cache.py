"""The GEAR cache that a store hands out: it knows which whole blocks it was fed, and nothing else is different."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins.gear import GEARCache


Window = tuple[torch.Tensor, torch.Tensor]


class BlockRecord:
    """
    Which blocks a cache was fed one by one, and what layers of sliding windows held at their ends, as these forget.

    Attributes:
        length (`int`): tokens of a block; 0 if nothing is recorded.
        num_blocks (`int`): whole blocks that the cache begins with, each fed by a forward of its own or loaded.
        windows (`dict[int, dict[int, tuple]]`): by block and layer, keys and values of the block's newest tokens.
    """

    def __init__(self, length: int = 0):
        self.length, self.num_blocks = length, 0
        self.windows: dict[int, dict[int, Window]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> BlockRecord:
        # A copy goes on from a prompt, and nobody keeps its blocks anew
        return BlockRecord()

    def before_update(self, layers: list[Any], held: int, count: int) -> None:
        """Notes that `count` tokens follow those `held`, before they do."""
        if not self.length:
            return
        self.note_windows(layers, held)
        self.num_blocks = min(self.num_blocks, held // self.length)
        if held == self.num_blocks * self.length and count == self.length:
            self.num_blocks += 1

    def note_windows(self, layers: list[Any], held: int) -> None:
        """Notes what sliding windows hold, if a block ends here: their tensors are replaced, never written to."""
        if not self.num_blocks or held != self.num_blocks * self.length:
            return
        self.windows[self.num_blocks - 1] = {
            index: (layer.keys[:, :, -self.length :], layer.values[:, :, -self.length :])
            for index, layer in enumerate(layers)
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.values is not None
        }

    def can_cut(self, layers: list[Any], number: int) -> bool:
        """Whether all layers still know what they held at a block's end."""
        return number in self.windows or not any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)


class PromptCache(GEARCache):
    """
    A `GEARCache` of a prompt in blocks, as a `PromptStore` makes it. See there and `GEARCache`.

    Args:
        model (`PreTrainedModel`): the model.
        options: those of `GEARCache`.

    Attributes:
        record (`BlockRecord`): which blocks it was fed; `record.length` is how many tokens a block has.
        model_name (`str`): what the model is called.
    """

    def __init__(self, model: PreTrainedModel, **options: Any):
        self.record = BlockRecord()
        self.model_name = str(model.config.name_or_path)
        super().__init__(model, **options)

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == 0:
            self.record.before_update(self.layers, self.get_seq_length(), key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
