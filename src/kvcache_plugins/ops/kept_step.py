"""A layer's decode step on a GPU as launches that are kept: from one token to the next only the query and the newest
exact tokens change, until something is compressed.

The host takes a fraction of the time so. Nothing is read back from the device, and all that is allocated is the result
and a workspace, so a step can be captured in a graph.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.triton_kernels.attention.attend import Launch
from kvcache_plugins.triton_kernels.attention.attend_kernel import attend_kernel
from kvcache_plugins.triton_kernels.attention.combine import combine_kernel, prepare_combination
from kvcache_plugins.triton_kernels.attention.dense_part import DensePart as KernelDensePart
from kvcache_plugins.triton_kernels.kept_launch import ALIGNMENT, KeptLaunch, can_keep

from .parts import CompressedPart, DensePart
from .rotation import rotate


_MAX_PARTS = 2
_FLOAT32_BYTES = 4


class KeptStep:
    """
    The launches of attention over compressed parts and exact ones, of which the last grows. It is made by making them.

    Args:
        rows (`torch.Tensor` of shape `[B, H, rows, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts.
        compressed (`Sequence[CompressedPart]`): compressed parts, the first of which keeps the step.
        launches (`Sequence[Launch]`): those of the compressed parts.
        scale (`float`): factor of the scores.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        dense: Sequence[DensePart],
        compressed: Sequence[CompressedPart],
        launches: Sequence[Launch],
        scale: float,
    ) -> None:
        self._query, self._scale, self._newest = _query_layout(rows), scale, _newest_layout(dense[-1])
        self._others, self._first_dense = list(compressed[1:]), list(dense[:-1])
        self._are_rotated = [part.values.is_rotated for part in compressed]
        self._shapes = [launch.partials.output.shape for launch in launches]
        # Numbers of outputs, of maxima and of totals of each part in the workspace
        self._sizes = [(_padded(math.prod(shape)), _padded(math.prod(shape[:-1]))) for shape in self._shapes]
        self._workspace_size = sum(outputs + 2 * maxima for outputs, maxima in self._sizes)
        self._attending = [
            KeptLaunch(attend_kernel, launch.grid, launch.arguments, launch.options) for launch in launches
        ]
        partials = [
            launch.partials._replace(output=rotate(launch.partials.output)) if is_rotated else launch.partials
            for launch, is_rotated in zip(launches, self._are_rotated, strict=True)
        ]
        exact = [KernelDensePart(*part.in_use(), part.mask) for part in dense]
        launch = prepare_combination(partials, exact, rows, scale)
        self._combining = KeptLaunch(combine_kernel, launch.grid, launch.arguments, launch.options)
        self._first_result: torch.Tensor | None = launch.result
        self._result_shape = launch.result.shape

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copies and pickles of a cache have tensors of their own, and make steps of their own
        return type(None), ()

    def take_first_result(self) -> torch.Tensor:
        """What the step gave that it was made by, once."""
        result, self._first_result = self._first_result, None
        assert result is not None
        return result

    def fits(
        self, rows: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
    ) -> bool:
        """Whether a step over these parts, of which the first compressed one keeps this one, is this one again."""
        return (
            scale == self._scale
            and _are_same(self._first_dense, dense[:-1])
            and _are_same(self._others, compressed[1:])
            and _query_layout(rows) == self._query
            and _newest_layout(dense[-1]) == self._newest
        )

    def __call__(self, rows: torch.Tensor, newest: DensePart) -> torch.Tensor:
        """Attention `[B, H, rows, value D]` with other queries and newest tokens."""
        result = rows.new_empty(self._result_shape)
        workspace = rows.new_empty(self._workspace_size, dtype=torch.float32)
        combining, query, start = self._combining, rows.data_ptr(), 0
        for index, launch in enumerate(self._attending):
            num_outputs, num_maxima = self._sizes[index]
            address = workspace.data_ptr() + _FLOAT32_BYTES * start
            pointers = {
                "output": address,
                "maximum": address + _FLOAT32_BYTES * num_outputs,
                "total": address + _FLOAT32_BYTES * (num_outputs + num_maxima),
            }
            launch.change("query_ptr", query)
            for name, pointer in pointers.items():
                launch.change(f"{name}_ptr", pointer)
                combining.change(f"{name}_{index}_ptr", pointer)
            launch()
            if self._are_rotated[index]:
                output = workspace[start : start + math.prod(self._shapes[index])].view(self._shapes[index])
                combining.change(f"output_{index}_ptr", rotate(output))
            start += num_outputs + 2 * num_maxima
        combining.change("query_ptr", query)
        combining.change("result_ptr", result.data_ptr())
        self._change_newest(newest)
        combining()
        return result

    def _change_newest(self, newest: DensePart) -> None:
        """The part that has grown, and may have moved."""
        index = len(self._first_dense)
        for name, states in (("keys", newest.keys), ("values", newest.values)):
            self._combining.change(f"{name}_{index}_ptr", states.data_ptr())
            self._combining.change(f"{name}_{index}_stride_b", states.stride(0))
            self._combining.change(f"{name}_{index}_stride_h", states.stride(1))
        self._combining.change(f"num_tokens_{index}", newest.length)


def _padded(count: int) -> int:
    """Float32 numbers behind which others are aligned."""
    return -(-count * _FLOAT32_BYTES // ALIGNMENT) * ALIGNMENT // _FLOAT32_BYTES


def can_keep_step(
    rows: torch.Tensor,
    dense: Sequence[DensePart],
    compressed: Sequence[CompressedPart],
    launches: Sequence[Launch],
) -> bool:
    """Whether a step's launches can be kept: without a mask that every token has anew, and where Triton compiles."""
    return (
        can_keep(attend_kernel)
        and 0 < len(compressed) <= _MAX_PARTS
        and 0 < len(dense) <= _MAX_PARTS
        and dense[-1].mask is None
        and all(part.length for part in dense)
        and all(launch.partials.output.numel() for launch in launches)
        and rows.stride(-1) == 1
        and rows.data_ptr() % ALIGNMENT == 0
        and all(_newest_layout(dense[-1])[-4:])
    )


def _query_layout(rows: torch.Tensor) -> tuple[Any, ...]:
    """What a kept step is for, of queries."""
    return rows.shape, rows.stride(), rows.dtype, rows.data_ptr() % ALIGNMENT


def _newest_layout(part: DensePart) -> tuple[Any, ...]:
    """The same of the newest tokens, which come to be more and move."""
    layout: tuple[Any, ...] = (part.mask is None, part.length > 0)
    are_aligned: tuple[bool, ...] = ()
    for states in (part.keys, part.values):
        batch, head, token, channel = states.stride()
        layout += (token, channel, states.dtype)
        are_aligned += (states.data_ptr() % ALIGNMENT == 0, batch % ALIGNMENT == 0 and head % ALIGNMENT == 0)
    return layout + are_aligned


def _are_same(kept: Sequence[object], given: Sequence[object]) -> bool:
    return len(kept) == len(given) and all(mine is theirs for mine, theirs in zip(kept, given, strict=True))
