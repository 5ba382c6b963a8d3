"""Whether the masks that replayed steps are given hide what a recording hides: the padding, and nothing else.

A recording has no mask of its caller's: `generate` appends ones to what it began with. Any other caller may do
something else, and only the device knows what a mask holds. So it is compared there, with nothing read, and what came
of it is asked for where the host waits anyway.
"""

import torch


class StepMasks:
    """
    The masks of steps since it was last asked, or made.

    Args:
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that are hidden.
    """

    def __init__(self, padding: torch.Tensor | None):
        self._padding = padding
        self._is_right: torch.Tensor | None = None

    def fits(self, mask: torch.Tensor) -> bool:
        """Whether a mask `[B, tokens]` hides the padding alone. The host waits for the device."""
        return bool(self._hides_padding_alone(mask))

    def add(self, mask: torch.Tensor) -> None:
        """Takes the mask of a step into account; nothing is read."""
        is_right = self._hides_padding_alone(mask)
        self._is_right = is_right if self._is_right is None else self._is_right.logical_and(is_right)

    def check(self) -> None:
        """
        Raises a `ValueError` if one of the masks hid anything else. The host waits for the device, if there were any.
        """
        is_right, self._is_right = self._is_right, None
        if is_right is not None and not bool(is_right):
            raise ValueError(
                "`captured_steps`: `attention_mask` hides other tokens than the padding of the prompt in a step that "
                "was replayed, where they were attended to: tokens since the last chunk was compressed may be wrong. "
                "It may only grow by ones; use the cache outside of `captured_steps` with any other"
            )

    def _hides_padding_alone(self, mask: torch.Tensor) -> torch.Tensor:
        if self._padding is None:
            return mask.all()
        if self._padding.device != mask.device:
            self._padding = self._padding.to(mask.device)
        return (mask.bool() == (torch.arange(mask.shape[1], device=mask.device) >= self._padding[:, None])).all()
