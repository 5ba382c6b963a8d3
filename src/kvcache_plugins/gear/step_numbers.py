"""The numbers that change from one token to the next, on the device: what a graph that is replayed reads."""

import torch


class StepNumbers:
    """
    Numbers of the step under way. All layers are alike.

    Args:
        device (`torch.device`): where kernels read them.

    Attributes:
        stored (`torch.Tensor` of shape `[1]`): tokens of the block that decoded tokens join.
        exact (`torch.Tensor` of shape `[1]`): tokens of the buffer, with the one that is being stored.
        place (`torch.Tensor` of shape `[1]`): where in the buffer that one goes.
        total (`torch.Tensor` of shape `[]`): tokens before it.
    """

    def __init__(self, device: torch.device):
        self._numbers = torch.zeros(4, dtype=torch.int64, device=device)
        self._growth = torch.tensor([0, 1, 1, 1], device=device)
        self.stored, self.exact, self.place = self._numbers[:3].split(1)
        self.total = self._numbers[3]
        # What the device holds, as far as the host knows
        self._held: tuple[int, int, int] | None = None

    def set(self, numbers: tuple[int, int, int]) -> None:
        """Has the device hold tokens of the open block, of the buffer, and of all, before a step."""
        if numbers != self._held:
            stored, exact, total = numbers
            self._held = None
            self._numbers.copy_(torch.tensor([stored, exact + 1, exact, total]))
            self._held = numbers

    def advance(self) -> None:
        """What a step does in the end, on the device."""
        self._numbers.add_(self._growth)

    def is_advancing(self) -> None:
        """Called before a step: until it is known to have been, the host does not know what the device holds."""
        self._before, self._held = self._held, None

    def has_advanced(self) -> None:
        """Called after it."""
        assert self._before is not None
        stored, exact, total = self._before
        self._held = stored, exact + 1, total + 1
