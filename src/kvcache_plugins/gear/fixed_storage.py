"""Layers whose storage has its room ahead and stays where it is, so that what was recorded of a step can be replayed.

    [ prefix ] [ blocks ] [ open block: room for tokens to come ] [ buffer: room for all that wait ]

The layer goes on as any other. Whatever grows beyond its room, or is put elsewhere by a crop or a reordering, ends the
form, and another one is made.
"""

from typing import Any

import torch

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.engine import MAX_NUM_QUERIES
from kvcache_plugins.layers.residual_buffer import ResidualBuffer

from .replayable import ReplayableMixin
from .step_numbers import StepNumbers


class FixedBuffer(ResidualBuffer):
    """
    A buffer that stays where it is, as long as what waits fits into its room.

    Args:
        keys, values (`torch.Tensor` of shape `[B, H, 0, D]`): states of its kind.
        limit (`int`): the most that waits in ordinary decoding.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, limit: int):
        super().__init__(keys, values, limit)
        # A few tokens at once may come on top, as in assisted decoding
        self._resize(limit + MAX_NUM_QUERIES)

    def drop_first(self, count: int) -> None:
        """See `ResidualBuffer.drop_first`; the room stays."""
        self._write_left()
        self.length -= count
        for states in self.storage:
            states[:, :, : self.length] = states[:, :, count : count + self.length].clone()

    def released(self) -> ResidualBuffer:
        """See `ResidualBuffer.released`: an empty one, in the same place."""
        self.length, self.left = 0, None
        return self

    def ordinary(self) -> ResidualBuffer:
        """The same tokens in a buffer that grows."""
        buffer = ResidualBuffer(self.keys[:, :, :0], self.values[:, :, :0], self.limit)
        buffer.append(self.keys, self.values)
        return buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidualBuffer:
        # Copies of a cache are not replayed
        copied = memo[id(self)] = self.ordinary()
        return copied


class FixedForm:
    """
    A layer that stands still. Making it moves what the layer stores to where there is room.

    Args:
        layer (`ReplayableMixin`): the layer, which `is_replayable`.
        num_tokens (`int`): decoded tokens that there shall be room for.
    """

    def __init__(self, layer: ReplayableMixin[Any], num_tokens: int):
        shapes = [layer.states_shape(side) for side in ("keys", "values")]
        keys, values = (
            torch.empty(*shape[:2], 0, shape[3], dtype=layer.dtype, device=layer.device) for shape in shapes
        )
        self.layer, self.buffer = layer, FixedBuffer(keys, values, layer.config.residual_length)
        self.block = layer.stand_still(self.buffer, num_tokens)
        self._places, self._closed_lengths = self._all_places(), layer.closed_lengths()

    def stays(self) -> bool:
        """Whether all that the layer stores is where it was."""
        before, now = self._places, self._all_places()
        return (
            len(before) == len(now)
            and all(mine is theirs for mine, theirs in zip(before, now, strict=True))
            and self.layer.closed_lengths() == self._closed_lengths
        )

    def has_room(self) -> bool:
        """Whether another token is stored in the buffer, with nothing compressed before it."""
        return self.layer.is_waiting() and self.buffer.length < self.buffer.capacity

    def numbers(self) -> tuple[int, int, int]:
        """Tokens of the open block, of the buffer, and of all."""
        return self.block.length, self.buffer.length, self.layer.get_seq_length()

    def count_token(self) -> None:
        """Takes down that a token has been stored and attended to."""
        self.layer.count_token()

    def parts(self, numbers: StepNumbers) -> list[Any]:
        """All parts that attention goes over, with the token that is being stored, and lengths on the device."""
        keys, values = self.buffer.tensors()
        newest = DensePart(keys, values, keys.shape[2], None, numbers.exact)
        return [*self.layer.step_parts(numbers.stored), newest]

    def end(self) -> None:
        """Makes it an ordinary layer with the same contents."""
        buffer = self.layer.buffer
        self.layer.move_on(buffer.ordinary() if isinstance(buffer, FixedBuffer) else buffer)

    def _all_places(self) -> list[object]:
        return [*self.layer.places(), *self.buffer.tensors()]
