"""A launch that is made again and again with other arguments here and there.

Triton looks at every argument of every launch to know which of its kernels is meant: 80 arguments take longer than the
kernel runs. Of a launch that is kept the kernel is known, and whoever changes an argument sees to it that it stays the
right one: pointers aligned as they were, strides multiples of 16 where they were.
"""

from collections.abc import Collection, Mapping
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
        names = [parameter.name for parameter in kernel.params]
        self._places = {name: place for place, name in enumerate(names)}
        self._arguments = [arguments[name] for name in names]

    def change(self, name: str, value: Any) -> None:
        """Gives an argument another value."""
        self._arguments[self._places[name]] = value

    def forget(self, names: Collection[str]) -> None:
        """Lets go of the tensors that arguments of these names are, until they are given others."""
        for name, place in self._places.items():
            if name.split("_")[0] in names and name.endswith("_ptr"):
                self._arguments[place] = 0

    def __call__(self) -> None:
        """Launches on the current stream."""
        self._run(*self._arguments)


def can_keep(kernel: Any) -> bool:
    """Whether launches of a kernel can be kept: not in Triton's interpreter."""
    return isinstance(kernel, triton.JITFunction)
