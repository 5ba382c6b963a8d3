"""The paper's search for a partition: ever finer grids of boundaries, each partition measured."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .slices import Partition, check_length, checked_lengths, even, rounded


# The paper's grid: values tried of every boundary, and what the step is divided by from level to level
_OFFSETS = (-2, -1, 0, 1, 2)
_STEP_DIVISOR = 4
# With 3 boundaries a level is 125 runs; with more, two are moved at a time, which is 25
_MAX_GRID = 125


def searched(
    length: int,
    num_ranks: int,
    measure: Callable[[Partition], float],
    *,
    start: Sequence[int] | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
) -> Partition:
    """
    The best partition of the paper's hierarchical grid: never worse, by what was measured, than its start.

    In a level five values of every boundary are tried, a step apart; the next level has a quarter of the step and the
    best so far in its middle. A level is repeated while it finds better. A grid of more than 125 partitions is not
    tried whole: two neighbouring boundaries are moved at a time, and the others in proportion. No partition is
    measured twice.

    Args:
        length (`int`): tokens of the context.
        num_ranks (`int`): ranks, all of which are used.
        measure (`Callable[[tuple[int, ...]], float]`): seconds to the first token with slices of these lengths.
        start (`Sequence[int]`, *optional*): slices to begin with, such as predicted ones; `even` if not given.
        first_step (`int`, *optional*): tokens; a quarter of an even slice if not given.
        last_step (`int`, *optional*): no level has a smaller one; a 256th of the context if not given.

    Raises:
        ValueError: if the start is no partition of `length` into `num_ranks`, a step is below 1, or a measurement is
        no number.
    """
    check_length(length, num_ranks)
    best = even(length, num_ranks) if start is None else checked_lengths("start", tuple(start), length)
    if len(best) != num_ranks:
        raise ValueError(f"`start` has to have a slice for each of {num_ranks} ranks but got {list(best)}")
    step = max(1, length // (_STEP_DIVISOR * num_ranks)) if first_step is None else first_step
    last_step = max(1, length // 256) if last_step is None else last_step
    if step < 1 or last_step < 1:
        raise ValueError(f"`first_step` and `last_step` have to be at least 1 but got {step} and {last_step}")
    seconds: dict[Partition, float] = {}

    def measured(lengths: Partition) -> float:
        if lengths not in seconds:
            seconds[lengths] = measure(lengths)
            if math.isnan(seconds[lengths]):
                raise ValueError(f"`measure` has to return seconds but returned NaN for {list(lengths)}")
        return seconds[lengths]

    while True:
        again = True
        while again:
            again = False
            for grid in _grids(num_ranks, step):
                # The middle first: of equally fast ones it stays
                better = min((best, *grid(best)), key=measured)
                again |= better != best
                best = better
        if step <= last_step:
            return best
        step = max(step // _STEP_DIVISOR, last_step)


def _grids(num_ranks: int, step: int) -> list[Callable[[Partition], Iterator[Partition]]]:
    """One after the other what is tried of a level: the grid of all boundaries, or of each pair of neighbours."""
    boundaries = tuple(range(num_ranks - 1))
    if len(_OFFSETS) ** len(boundaries) <= _MAX_GRID:
        return [partial(_grid, step, boundaries)]
    return [partial(_grid, step, pair) for pair in itertools.pairwise(boundaries)]


def _grid(step: int, boundaries: tuple[int, ...], middle: Partition) -> Iterator[Partition]:
    """Partitions with some boundaries moved by whole steps, and the slices between these stretched in proportion."""
    ends = list(itertools.accumulate(middle))
    for offsets in itertools.product(_OFFSETS, repeat=len(boundaries)):
        fixed = [(0, 0), *((ends[each], offset * step) for each, offset in zip(boundaries, offsets, strict=True))]
        parts = itertools.pairwise([*fixed, (ends[-1], 0)])
        scales = [1 + (move_2 - move_1) / (end - begin) for (begin, move_1), (end, move_2) in parts]
        if min(scales) <= 0:
            continue
        groups = [sum(each < rank for each in boundaries) for rank in range(len(middle))]
        yield rounded(length * scales[group] for length, group in zip(middle, groups, strict=True))
