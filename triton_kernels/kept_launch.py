"""A launch that is made again and again with other arguments here and there.

Triton looks at every argument of every launch to know which of its kernels is meant: 80 arguments take longer than the
kernel runs. Of a launch that is kept the kernel is known, and whoever changes an argument sees to it that it stays the
right one: pointers aligned as they were, strides multiples of 16 where they were.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import triton


# Bytes that Triton looks for in pointers, and units in which it looks at integers
ALIGNMENT = 16


class KeptLaunch:
    """
    A launch, made when it is kept.

    Args:
        kernel (`triton.JITFunction`): the kernel.
        grid (`tuple[int, int, int]`): programs.
        arguments (`Mapping[str, Any]`): all of its parameters by name.
        options (`Mapping[str, int]`): warps and stages.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any], options: Mapping[str, int]
    ) -> None:
        self._run = kernel[grid](**arguments, **options)[grid]
        self._names = [parameter.name for parameter in kernel.params]
        self._arguments = [arguments[name] for name in self._names]

    def places(self, names: Iterable[str]) -> list[int]:
        """Where arguments of these names stand."""
        return [self._names.index(name) for name in names]

    def change(self, places: Sequence[int], values: Sequence[Any]) -> None:
        """Gives the arguments at some places other values."""
        arguments = self._arguments
        for place, value in zip(places, values, strict=True):
            arguments[place] = value

    def forget(self, names: Collection[str]) -> None:
        """Lets go of the tensors that arguments of these names are, until they are given others."""
        for place, name in enumerate(self._names):
            if name.split("_")[0] in names and name.endswith("_ptr"):
                self._arguments[place] = 0

    def __call__(self) -> None:
        """Launches on the current stream."""
        self._run(*self._arguments)


def can_keep(kernel: Any) -> bool:
    """Whether launches of a kernel can be kept: not in Triton's interpreter."""
    return isinstance(kernel, triton.JITFunction)
