"""The first tokens of every sequence, exact, beside the codes of all tokens.

Attention gives them much weight whatever they say, and their keys are unlike all others: in a group of codes they
would widen the ranges of their neighbours.

Legend: B batch, H key/value heads, D and E head dimensions of keys and values, K slots, S sink tokens.
"""

from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.codecs.parts import SinkStates
from kvcache_plugins.layers.left_padding import LeftPadding


class SinkTokens:
    """
    Exact keys and values of the sink tokens of a layer, as soon as any has been seen.

    Args:
        count (`int`): S, how many of a sequence there are.
    """

    def __init__(self, count: int):
        self.count = count
        # Keys and values `[B, H, S, D or E]`
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None
        self._padding = LeftPadding()

    def are_from(self, position: int, padding: LeftPadding) -> bool:
        """Tells whether any sequence has sink tokens from `position` on."""
        return self.count > 0 and position < padding.longest() + self.count

    def others(self, keys: torch.Tensor, position: int, padding: LeftPadding) -> torch.Tensor:
        """Tells which of the tokens `[B, H, tokens, D]` from `position` on are neither sink tokens nor padding."""
        # With its data even where keys have none
        on = torch.device("cpu") if keys.is_meta else keys.device
        number = torch.arange(position, position + keys.shape[2], device=on)
        return number - padding.first_tokens(keys.shape[0], on) >= self.count

    def keep(self, keys: torch.Tensor, values: torch.Tensor, position: int, padding: LeftPadding) -> None:
        """Keeps those of the tokens `[B, H, tokens, D or E]` from `position` on that are sinks of their sequence."""
        self._padding = padding
        if self._states is None:
            room = *keys.shape[:2], self.count
            self._states = keys.new_zeros(*room, keys.shape[3]), values.new_zeros(*room, values.shape[3])
        if not self.are_from(position, padding):
            return
        place = padding.first_tokens(keys.shape[0], keys.device) - position
        place = place + torch.arange(self.count, device=keys.device)
        is_here = ((place >= 0) & (place < keys.shape[2]))[:, None, :, None]
        place = place.clamp(0, keys.shape[2] - 1)[:, None, :, None]
        new_keys, new_values = (
            torch.where(is_here, states.gather(2, place.expand(-1, states.shape[1], -1, states.shape[3])), before)
            for states, before in zip((keys, values), self._states, strict=True)
        )
        self._states = new_keys, new_values

    def restore(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values `[B, H, K, D or E]` of slots `[B, H, K]`, exact where they are sink tokens'."""
        if self.count == 0:
            return keys, values
        stored = self.stored()
        number = slots if stored.first is None else slots - stored.first.to(slots.device)[:, None, None]
        is_sink = ((number >= 0) & (number < self.count))[..., None]
        index = number.clamp(0, self.count - 1)[..., None]
        keys, values = (
            torch.where(is_sink, exact.gather(2, index.expand(-1, -1, -1, exact.shape[3])), states)
            for exact, states in zip((stored.keys, stored.values), (keys, values), strict=True)
        )
        return keys, values

    def stored(self) -> SinkStates:
        """Returns their states, and which tokens they are."""
        assert self._states is not None
        return SinkStates(self._padding.counts, *self._states)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        if self._states is not None:
            self._states = function(self._states[0]), function(self._states[1])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields what is stored."""
        yield from self._states or ()
