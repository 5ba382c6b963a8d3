"""One of Transformers' own layers with a window, beside compressed ones, while their steps are replayed.

    [ room | tokens that the next query sees, the newest last ] [ the new token ]

A step stores its token in the last place and attends to all places that are in use; behind it everything moves up by
one. So nothing stands elsewhere from step to step, a step that is run twice before it counts is as one, and what the
layer holds is always a view of it, in order.
"""

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicSlidingWindowLayer

from .step_numbers import StepNumbers


class FixedWindow:
    """
    A layer that stands still. What it holds is moved to where there is room for a whole window.

    Args:
        layer (`DynamicSlidingWindowLayer`): the layer, which holds something.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that are hidden.
    """

    def __init__(self, layer: DynamicSlidingWindowLayer, padding: torch.Tensor | None):
        self.layer, self.size = layer, layer.sliding_window
        held = self.held()
        self._keys, self._values = (
            torch.zeros(*states.shape[:2], self.size, states.shape[3], dtype=states.dtype, device=states.device)
            for states in held
        )
        # Positions of the places, from that of the new token on, and the first that is seen
        self._offsets = torch.arange(1 - self.size, 1, device=held[0].device)
        self._first = torch.zeros(1, 1, dtype=torch.int64, device=held[0].device)
        if padding is not None:
            self._first = padding.to(held[0].device)[:, None]
        self._view: torch.Tensor | None = None
        self.take_up()

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the layer holds, `[B, H, tokens, D]`."""
        assert self.layer.keys is not None and self.layer.values is not None
        return self.layer.keys, self.layer.values

    def stays(self) -> bool:
        """Whether the layer's states are of the same sizes; that they stand elsewhere does not matter."""
        keys, _ = self.held()
        is_same = keys.shape[:2] == self._keys.shape[:2] and keys.dtype == self._keys.dtype
        return is_same and keys.device == self._keys.device

    def is_at(self, length: int) -> bool:
        """Whether the layer holds what is seen after so many tokens, and nothing else."""
        is_recording = getattr(self.layer, "record_past", False)
        return self.layer.cumulative_length == length and not is_recording

    def take_up(self) -> None:
        """Moves what the layer holds, unless it has stayed."""
        if self.layer.keys is self._view:
            return
        for places, states in zip((self._keys, self._values), self.held(), strict=True):
            count = min(states.shape[2], self.size - 1)
            # What is left of a crop lies in the same places
            newest = states[:, :, states.shape[2] - count :].clone()
            places[:, :, self.size - 1 - count : self.size - 1] = newest
        self._expose()

    def count_token(self) -> None:
        """Takes down that a token has been stored and all places have moved up."""
        self.layer.cumulative_length += 1
        self._expose()

    def end(self) -> None:
        """Gives the room back."""
        if self.layer.keys is self._view:
            self.layer.keys, self.layer.values = (states.clone() for states in self.held())

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts a token `[B, H, 1, D]` in the last place."""
        self._keys[:, :, -1:], self._values[:, :, -1:] = keys, values

    def attend(self, query: torch.Tensor, numbers: StepNumbers, scale: float | None) -> torch.Tensor:
        """Attention of a query `[B, H * G, 1, D]` over all places that are in use and no padding."""
        seen = (numbers.total + self._offsets >= self._first)[:, None, None]
        return F.scaled_dot_product_attention(
            query, self._keys, self._values, attn_mask=seen, scale=scale, enable_gqa=True
        )

    def move_up(self) -> None:
        """What a step does in the end."""
        for places in (self._keys, self._values):
            places[:, :, :-1] = places[:, :, 1:].clone()

    def _expose(self) -> None:
        count = min(self.layer.cumulative_length, self.size - 1)
        in_use = slice(self.size - 1 - count, self.size - 1)
        self._view = self.layer.keys = self._keys[:, :, in_use]
        self.layer.values = self._values[:, :, in_use]
