"""Exchange of one rank with its neighbours in one prefill: a layer's prefix comes in, and goes out with the slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .messages import MessageLayout
from .transport import RECEIVES_AHEAD, Neighbours


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """
    Tokens of a prompt that one rank prefills.

    Attributes:
        start, stop (`int`): positions of the slice.
        batch_size (`int`): sequences of the prompt.
        padding (`list[int]`, *optional*): number of tokens at the start of each sequence that are padding.
    """

    start: int
    stop: int
    batch_size: int
    padding: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the slice."""
        return self.stop - self.start

    def padding_for(self, batch_size: int, first: int = 0) -> list[int] | None:
        """Return the padding from position `first` on of a forward's sequences, which may repeat the prompt's."""
        if self.padding is None:
            return None
        return [max(count - first, 0) for count in self.padding for _ in range(batch_size // self.batch_size)]


class PrefixExchange:
    """
    Keys and values of a rank's slice and of the tokens before it, layer by layer.

    Args:
        neighbours (`Neighbours`): the ranks before and behind.
        layouts (`list[MessageLayout]`): rows of every layer.
        prompt_slice (`PromptSlice`): this rank's tokens.
    """

    def __init__(self, neighbours: Neighbours, layouts: list[MessageLayout], prompt_slice: PromptSlice) -> None:
        self.neighbours = neighbours
        self.layouts = layouts
        self.prompt_slice = prompt_slice
        # Buffers of posted receives by layer
        self._posted: dict[int, torch.Tensor] = {}
        # Counters of `RunaheadOutput`
        self.dot_products = 0
        self.entries_sent = 0

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Wait for a layer's prefix, send it on with the slice's states `[B, H, tokens, D or E]`, and return both, or as
        much of them as a window sees.
        """
        layout, part = self.layouts[layer_idx], self.prompt_slice
        kept = layout.num_kept(part.start)
        rows = self._receive(layer_idx)
        self.dot_products += keys.shape[2] * (kept + keys.shape[2])
        # Beams repeat the prompt's sequences on the last rank
        repeats = keys.shape[0] // part.batch_size
        if repeats == 1:
            layout.write(rows[kept:], keys, values)
        if self.neighbours.behind is not None:
            sent = rows[rows.shape[0] - layout.num_kept(part.stop) :]
            self.neighbours.send(layer_idx, sent)
            self.entries_sent += 2 * sent.shape[0]
        if kept == 0:
            return keys, values
        if repeats == 1:
            return layout.read(rows)
        before_keys, before_values = (states.repeat_interleave(repeats, dim=0) for states in layout.read(rows[:kept]))
        return torch.cat([before_keys, keys], dim=2), torch.cat([before_values, values], dim=2)

    def stats(self) -> dict[str, int | float]:
        """Return counters of `RunaheadOutput`."""
        return {
            "seconds_waited": self.neighbours.seconds_waited,
            "bytes_sent": self.neighbours.bytes_sent,
            "bytes_received": self.neighbours.bytes_received,
            "dot_products": self.dot_products,
            "entries_sent": self.entries_sent,
        }

    def post_receives(self, layer_idx: int = 0) -> None:
        """Post the receives of a few layers from `layer_idx` on."""
        if self.neighbours.before is None:
            return
        part = self.prompt_slice
        for index in range(layer_idx, min(layer_idx + RECEIVES_AHEAD, len(self.layouts))):
            if index not in self._posted:
                kept = self.layouts[index].num_kept(part.start)
                # The slice is written behind the prefix
                rows = self.layouts[index].make_rows(kept + part.num_tokens, part.batch_size)
                self.neighbours.post_receive(index, rows[:kept])
                self._posted[index] = rows

    def _receive(self, layer_idx: int) -> torch.Tensor:
        """Return a layer's rows: the prefix, or as much of it as a window sees, and room for the slice."""
        if self.neighbours.before is None:
            return self.layouts[layer_idx].make_rows(self.prompt_slice.num_tokens, self.prompt_slice.batch_size)
        self.neighbours.wait_for(layer_idx)
        self.post_receives(layer_idx + 1)
        return self._posted.pop(layer_idx)
