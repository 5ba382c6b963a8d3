"""A layer's decode step on a GPU as launches that are kept: from one token to the next only the query and the newest
exact tokens change, until something is compressed.

The host takes a fraction of the time so. Nothing is read back from the device, and all that is allocated is the result
and a workspace, so a step can be captured in a graph.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from kvcache_plugins.triton_kernels.attention.combine import combine, combine_kernel, prepare_combination
from kvcache_plugins.triton_kernels.attention.dense_part import DensePart as KernelDensePart
from kvcache_plugins.triton_kernels.attention.partials import Launch, Partials
from kvcache_plugins.triton_kernels.kept_launch import ALIGNMENT, KeptLaunch, can_keep

from .masking import slice_mask
from .parts import DensePart


_MAX_PARTS = 2
_FLOAT32_BYTES = 4
# Under which name a part keeps a step
_STEP = "step"
# What every step has of its own
_CHANGING = ("query", "output", "maximum", "total")


class StoredPart(Protocol):
    """A part that is stored compressed, and keeps what there is to keep of a step over it."""

    @property
    def kept(self) -> dict[str, Any]:
        """For kernels alone."""


PartT = TypeVar("PartT", bound=StoredPart)


class PartStep(NamedTuple):
    """
    What attention over a compressed part does.

    Args:
        launch (`Launch`): the launch that leaves partial results.
        finish (`Callable`, *optional*): makes outputs `[B, H, splits, rows, value D]` of those that it leaves, and of
            its totals.
    """

    launch: Launch
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def finished(self, partials: Partials) -> Partials:
        """The partial results as they are merged."""
        return partials if self.finish is None else partials._replace(output=self.finish(*partials[::2]))


def attend_parts(
    rows: torch.Tensor,
    dense: Sequence[DensePart],
    compressed: Sequence[PartT],
    scale: float,
    prepare: Callable[[torch.Tensor, PartT, float], PartStep],
) -> torch.Tensor:
    """
    Attention of rows `[B, H, rows, D]` over all parts; over parts that were seen before by launches that are kept.

    Args:
        rows (`torch.Tensor` of shape `[B, H, rows, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts, at most two, of which the last grows.
        compressed (`Sequence`): compressed parts, at least one.
        scale (`float`): factor of the scores.
        prepare (`Callable`): what is done with a compressed part, of rows, the part and the scale.
    """
    step = compressed[0].kept.get(_STEP)
    if isinstance(step, KeptStep) and step.fits(rows, dense, compressed, scale):
        return step(rows, dense[-1])
    parts = [prepare(rows, part, scale) for part in compressed]
    if _can_keep(rows, dense, parts):
        step = compressed[0].kept[_STEP] = KeptStep(rows, dense, compressed, parts, scale)
        return step.take_first_result()
    partials = [part.finished(part.launch()) for part in parts]
    return combine(partials, _exact(dense), rows, scale)


def _exact(dense: Sequence[DensePart]) -> list[KernelDensePart]:
    return [KernelDensePart(*part.in_use(), slice_mask(part.mask, 0, part.length), part.num_tokens) for part in dense]


class KeptStep:
    """
    The launches of attention over compressed parts and exact ones, of which the last grows. It is made by making them.

    Args:
        rows (`torch.Tensor` of shape `[B, H, rows, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts.
        compressed (`Sequence`): compressed parts, the first of which keeps the step.
        parts (`Sequence[PartStep]`): what is done with them.
        scale (`float`): factor of the scores.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        dense: Sequence[DensePart],
        compressed: Sequence[StoredPart],
        parts: Sequence[PartStep],
        scale: float,
    ) -> None:
        self._query, self._scale, self._newest = _query_layout(rows), scale, _newest_layout(dense[-1])
        self._others, self._first_dense = list(compressed[1:]), list(dense[:-1])
        self._finish = [part.finish for part in parts]
        launches = [part.launch for part in parts]
        self._shapes = [launch.partials.output.shape for launch in launches]
        # Numbers of outputs, of maxima and of totals of each part in the workspace
        self._sizes = [(_padded(math.prod(shape)), _padded(math.prod(shape[:-1]))) for shape in self._shapes]
        self._workspace_size = sum(outputs + 2 * maxima for outputs, maxima in self._sizes)
        self._attending = [
            KeptLaunch(launch.kernel, launch.grid, launch.arguments, launch.options) for launch in launches
        ]
        partials = [part.finished(part.launch.partials) for part in parts]
        launch = prepare_combination(partials, _exact(dense), rows, scale)
        self._combining = KeptLaunch(combine_kernel, launch.grid, launch.arguments, launch.options)
        self._first_result: torch.Tensor | None = launch.result
        self._result_shape = launch.result.shape
        for kept in (*self._attending, self._combining):
            kept.forget((*_CHANGING, "result"))
        self._attending_places = [kept.places(f"{name}_ptr" for name in _CHANGING) for kept in self._attending]
        self._combining_places = self._combining.places(self._changing_names())

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copies and pickles of a cache have tensors of their own, and make steps of their own
        return type(None), ()

    def take_first_result(self) -> torch.Tensor:
        """What the step gave that it was made by, once."""
        result, self._first_result = self._first_result, None
        assert result is not None
        return result

    def fits(
        self, rows: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[StoredPart], scale: float
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
        query, address, start = rows.data_ptr(), workspace.data_ptr(), 0
        changes: list[Any] = [query, result.data_ptr()]
        for index, launch in enumerate(self._attending):
            num_outputs, num_maxima = self._sizes[index]
            output: Any = address + _FLOAT32_BYTES * start
            maximum = output + _FLOAT32_BYTES * num_outputs
            total = maximum + _FLOAT32_BYTES * num_maxima
            launch.change(self._attending_places[index], (query, output, maximum, total))
            launch()
            finish = self._finish[index]
            if finish is not None:
                shape, behind = self._shapes[index], start + num_outputs + num_maxima
                totals = workspace[behind : behind + math.prod(shape[:-1])].view(shape[:-1])
                output = finish(workspace[start : start + math.prod(shape)].view(shape), totals)
            changes += (output, maximum, total)
            start += num_outputs + 2 * num_maxima
        # The newest tokens have grown, and may have moved
        for states in (newest.keys, newest.values):
            changes += (states.data_ptr(), *states.stride()[:2])
        self._combining.change(self._combining_places, [*changes, newest.length])
        self._combining()
        return result

    def _changing_names(self) -> list[str]:
        """What the last launch is given anew in every step, in the order in which it is."""
        blocks = [f"{name}_{index}_ptr" for index in range(len(self._attending)) for name in _CHANGING[1:]]
        newest = len(self._first_dense)
        states = [f"{name}_{newest}_{end}" for name in ("keys", "values") for end in ("ptr", "stride_b", "stride_h")]
        return ["query_ptr", "result_ptr", *blocks, *states, f"num_tokens_{newest}"]


def _padded(count: int) -> int:
    """Float32 numbers behind which others are aligned."""
    return -(-count * _FLOAT32_BYTES // ALIGNMENT) * ALIGNMENT // _FLOAT32_BYTES


def _can_keep(rows: torch.Tensor, dense: Sequence[DensePart], parts: Sequence[PartStep]) -> bool:
    """
    Whether a step's launches can be kept: without a mask that every token has anew, where Triton compiles, and where
    no graph keeps them.
    """
    return (
        0 < len(dense) <= _MAX_PARTS
        and dense[-1].mask is None
        and dense[-1].num_tokens is None
        and can_keep(combine_kernel)
        and len(parts) <= _MAX_PARTS
        and all(part.length for part in dense)
        and all(part.launch.partials.output.numel() for part in parts)
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
