"""A launch of a kernel with all that it is given, made once or again and again.

Triton looks at every argument of every launch to know which of its kernels is meant: 80 arguments take longer than the
kernel runs. Of a launch that is kept the kernel is known, and whoever changes an argument sees to it that it stays the
right one: pointers are of 16 bytes, and numbers that change are those that kernels are not specialized to.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton


# Bytes that Triton looks for in pointers, and units in which it looks at integers
ALIGNMENT = 16
# Of whether products are fused with sums Triton's own choice changes with 3.10, which it warns of
OPTIONS = {"enable_fp_fusion": True}


class Launch(NamedTuple):
    """
    A launch, made when it is called.

    Args:
        kernel (`triton.JITFunction`): the kernel.
        grid (`tuple[int, ...]`): programs.
        arguments (`dict[str, Any]`): all of its parameters by name.
        options (`dict[str, Any]`): warps, stages and what else it is compiled with.
        result: what it writes.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]
    result: Any

    def __call__(self) -> Any:
        """Launch on the current stream of the current device, unless there is nothing to do."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.options)
        return self.result


def tensor_arguments(name: str, tensor: torch.Tensor | None, dimensions: str) -> dict[str, Any]:
    """List a tensor and its first strides, those of `dimensions`, by the names of a kernel's parameters."""
    strides = (0,) * len(dimensions) if tensor is None else tensor.stride()[: len(dimensions)]
    names = (f"{name}_stride_{dimension}" for dimension in dimensions)
    return {f"{name}_ptr": tensor, **dict(zip(names, strides, strict=True))}


class KeptLaunch:
    """
    A launch that is made at every call, with its kernel compiled when it is kept. Threads may share it.

    Args:
        launch (`Launch`): the launch, of tensors that stay where they are.
        changing (`Sequence[str]`): arguments that a call gives anew, tensors and numbers; those of `launch` are not
            kept alive.
    """

    def __init__(self, launch: Launch, changing: Sequence[str] = ()) -> None:
        fixed = {name: argument for name, argument in launch.arguments.items() if name not in changing}
        self._launch, self._changing = launch._replace(arguments=fixed, result=None), changing
        names = launch.kernel.arg_names
        self._places = [names.index(name) for name in changing]
        # Addresses: of a tensor the launcher asks for its own, and the driver whether it is one of the GPU's
        self._values = [_address(launch.arguments[name]) for name in names]
        self._run = None
        # In Triton's interpreter nothing is compiled
        if isinstance(launch.kernel, triton.JITFunction):
            compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=launch.grid)
            self._run = compiled[(*launch.grid, 1, 1)[:3]]

    def __call__(self, *changed_arguments: torch.Tensor | int) -> None:
        """Launch on the current stream with other arguments, which are aligned where the kernel counts on it."""
        if self._run is None:
            changed = dict(zip(self._changing, changed_arguments, strict=True))
            self._launch._replace(arguments={**self._launch.arguments, **changed})()
            return
        # A copy, as another thread may be here at the same time
        values = self._values[:]
        for place, argument in zip(self._places, changed_arguments, strict=True):
            # Inlined, as a step changes a hundred arguments
            values[place] = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
        self._run(*values)


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
