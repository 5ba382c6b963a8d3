"""Rows of bytes of consecutive tokens, with room to grow."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvcache_plugins.ops.transform_coding.basis_coder import BasisCoder
from kvcache_plugins.ops.transform_coding.parts import RowCoder


# Share of the rows held that capacity grows by
_GROWTH = 64


@dataclass(eq=False)
class CodedBlock:
    """
    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows of both sides.
        start (`int`): index of the first token in the sequence, padding included.
        length (`int`): tokens in use.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds rows of tokens that follow; capacity grows little, as spare room is held too and moving is cheap."""
        total = self.length + keys.shape[2]
        if total > self.keys.shape[2]:
            capacity = max(total, self.length + self.length // _GROWTH)
            self.keys, self.values = (_resized(rows, self.length, capacity) for rows in (self.keys, self.values))
        self.keys[:, :, self.length : total] = keys
        self.values[:, :, self.length : total] = values
        self.length = total

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and gives the room of the others back."""
        self.keys, self.values = (_resized(rows, length, length) for rows in (self.keys, self.values))
        self.length = length

    def write_dense(
        self, side: str, coder: RowCoder | BasisCoder, padding: torch.Tensor | None, output: torch.Tensor
    ) -> None:
        """Writes the dense states of one side to their places in `output` `[B, H, tokens, D]`."""
        if side == "keys":
            states = coder.decode_keys(self.keys[:, :, : self.length], self.start, padding)
        else:
            states = coder.decode_values(self.values[:, :, : self.length])
        output[:, :, self.start : self.stop] = states

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)


def _resized(rows: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    resized = rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3])
    resized[:, :, :used] = rows[:, :, :used]
    return resized
