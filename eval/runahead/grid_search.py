"""The paper's search of a partition: a hierarchical grid of boundaries, whose partitions are measured or simulated."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvcache_plugins.kv_runahead.planner import Partition, check_lengths, round_ends
from kvcache_plugins.option_checks import check_integer


# Offsets of every boundary in steps, and the factor between the steps of two levels
_OFFSETS = (-2, -1, 0, 1, 2)
_STEP_DIVISOR = 4


def search_partition(
    start: Sequence[int],
    measure: Callable[[Sequence[Partition]], Iterable[float]],
    *,
    first_step: int | None = None,
    last_step: int | None = None,
) -> tuple[Partition, float]:
    """
    Search the fastest slices, and return them with their seconds, which are never more than those of `start`.

    A level tries five values of every boundary, a step of tokens apart; the next level has a quarter of the step and
    the best partition so far in its middle. A level is repeated while it finds a better one. If there are more than
    two boundaries, two neighbouring ones are moved at a time, the others in proportion. `measure` takes partitions,
    none twice.
    """
    best = check_lengths("start", tuple(start), sum(start))
    step = max(1, sum(start) // (_STEP_DIVISOR * len(best))) if first_step is None else first_step
    last_step = max(1, sum(start) // 256) if last_step is None else last_step
    check_integer("first_step", step, 1)
    check_integer("last_step", last_step, 1)
    seconds: dict[Partition, float] = {}
    boundaries = tuple(range(len(best) - 1))
    moves: list[tuple[int, ...]] = [*itertools.pairwise(boundaries)] or [boundaries]
    while True:
        before = best
        for moved in moves:
            # The middle is the first, so that it wins among equally fast ones
            tried = list(dict.fromkeys((best, *_grid(step, moved, best))))
            _measure_new(tried, measure, seconds)
            best = min(tried, key=seconds.__getitem__)
        if best == before:
            if step <= last_step:
                return best, seconds[best]
            step = max(step // _STEP_DIVISOR, last_step)


def _measure_new(
    partitions: Sequence[Partition],
    measure: Callable[[Sequence[Partition]], Iterable[float]],
    seconds: dict[Partition, float],
) -> None:
    """Measure partitions that have no `seconds` yet."""
    new = [each for each in partitions if each not in seconds]
    if not new:
        return
    for lengths, time in zip(new, measure(new), strict=True):
        if math.isnan(time):
            raise ValueError(f"`measure` has to return seconds but returned NaN for {list(lengths)}")
        seconds[lengths] = time


def _grid(step: int, boundaries: tuple[int, ...], middle: Partition) -> Iterator[Partition]:
    """Move some boundaries by whole steps, and stretch the slices between these in proportion."""
    ends = [0, *itertools.accumulate(middle)]
    fixed = [0, *(ends[each + 1] for each in boundaries), ends[-1]]
    for offsets in itertools.product(_OFFSETS, repeat=len(boundaries)):
        moved = [end + offset * step for end, offset in zip(fixed, (0, *offsets, 0), strict=True)]
        if all(begin < end for begin, end in itertools.pairwise(moved)):
            yield round_ends(np.interp(ends[1:], fixed, moved))
