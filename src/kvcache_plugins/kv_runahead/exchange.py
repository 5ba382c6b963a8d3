"""What a rank exchanges in each layer: it gets the prefix from the rank before, and sends it on with its own slice."""

import torch

from .communication import RECEIVES_AHEAD, Neighbours
from .prompt_slice import PromptSlice
from .shapes import LayerShape


class PrefixExchange:
    """
    The states of one rank's slice, and of what stands before it, layer by layer.

    Args:
        neighbours (`Neighbours`): the neighbours.
        shapes (`list[LayerShape]`): of every layer.
        prompt_slice (`PromptSlice`): what the rank prefills.

    Attributes:
        dot_products (`int`): pairs of queries and keys that lay before attention, for one head, summed over layers.
        entries_sent (`int`): keys and values, counted apart, that one head sent, summed over layers.
        hop_errors (`list[float]`): relative error of this rank's quantized states, layer by layer.
    """

    def __init__(self, neighbours: Neighbours, shapes: list[LayerShape], prompt_slice: PromptSlice):
        self.neighbours, self.shapes, self.prompt_slice = neighbours, shapes, prompt_slice
        # Buffers of receives posted and not yet waited for
        self._posted: dict[int, torch.Tensor] = {}
        self.dot_products, self.entries_sent = 0, 0
        self.hop_errors: list[float] = []

    def start(self) -> None:
        """Gets ready for what the rank before sends first."""
        self._post_receives(0)

    def finish(self) -> None:
        """Waits until everything has been sent."""
        self.neighbours.flush()

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Waits for the prefix of a layer and sends it on with the slice.

        Args:
            layer_idx (`int`): the layer.
            keys, values (`torch.Tensor` of shape `[batch_size, num_heads, slice, head_dim]`): of the slice.

        Returns:
            Keys and values of the prefix, or what the layer's window needs of it, and of the slice.
        """
        shape, part = self.shapes[layer_idx], self.prompt_slice
        kept, wire = shape.num_kept(part.start), shape.wire
        rows = self._receive(layer_idx)
        self.dot_products += keys.shape[2] * (kept + keys.shape[2])
        if self.neighbours.behind is not None:
            wire.write(rows[kept:], keys, values)
            sent = rows[rows.shape[0] - shape.num_kept(part.stop) :]
            self.neighbours.send(layer_idx, sent)
            self.entries_sent += 2 * sent.shape[0]
            if wire.nbits is not None:
                self._note_error(wire.read(rows[kept:]), (keys, values))
        if kept == 0:
            return keys, values
        if wire.nbits is None and keys.shape[0] == part.batch_size:
            if self.neighbours.behind is None:
                wire.write(rows[kept:], keys, values)
            return wire.read(rows)
        # The rank's own states are exact for itself; and beams repeat what has come for the prompt
        repeats = keys.shape[0] // part.batch_size
        before = (states.repeat_interleave(repeats, dim=0) for states in wire.read(rows[:kept]))
        all_keys, all_values = (
            torch.cat([prefix, own], dim=2) for prefix, own in zip(before, (keys, values), strict=True)
        )
        return all_keys, all_values

    def _post_receives(self, layer_idx: int) -> None:
        """Posts the receives of the layers from `layer_idx` on, a few of them."""
        if self.neighbours.before is None:
            return
        part = self.prompt_slice
        for index in range(layer_idx, min(layer_idx + RECEIVES_AHEAD, len(self.shapes))):
            if index not in self._posted:
                kept = self.shapes[index].num_kept(part.start)
                # With room for the slice behind the prefix
                rows = self.shapes[index].wire.make_rows(kept + part.num_tokens, part.batch_size)
                self.neighbours.post_receive(index, rows[:kept])
                self._posted[index] = rows

    def _receive(self, layer_idx: int) -> torch.Tensor:
        """Rows of a layer: what is kept of the prefix, and room for the slice."""
        if self.neighbours.before is None:
            return self.shapes[layer_idx].wire.make_rows(self.prompt_slice.num_tokens, self.prompt_slice.batch_size)
        self.neighbours.wait_for(layer_idx)
        rows = self._posted.pop(layer_idx)
        self._post_receives(layer_idx + 1)
        return rows

    def _note_error(self, rounded: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> None:
        for approximation, states in zip(rounded, exact, strict=True):
            error = (approximation.float() - states.float()).norm() / states.float().norm().clamp(min=1e-30)
            self.hop_errors.append(float(error))
