"""Slices of a context, one a rank, first rank first: given by the user, by a table, by a cost model or by a search.

Fewer slices than ranks leave ranks without work, which over a slow link can be faster.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from .cost import CostModel, Link, predict_ttfts
from .table import PartitionTable, check_ratios


# Lengths of slices, which sum to the context's; none is 0
Partition = tuple[int, ...]
NAMES = ("even", "planned")
# Of the closed forms for different numbers of ranks, how many are searched around, and how near to the best
_NUM_SEARCHED = 3
_NEAR = 1.1
# The share of the time that ranks have to save, or they are left free
_WORTH_A_RANK = 0.01
_BISECTIONS = 60
# A planned boundary is exact to this share of the context
_FINEST = 4096
# The paper's grid: values tried of every boundary, and what the step is divided by from level to level
_OFFSETS = (-2, -1, 0, 1, 2)
_STEP_DIVISOR = 4
# With 3 boundaries a level is 125 runs; with more, two are moved at a time, which is 25
_MAX_GRID = 125


def resolve_partition(
    partition: str | Sequence[int] | Sequence[float] | PartitionTable | None,
    length: int,
    num_ranks: int,
    *,
    model: PreTrainedModel | PreTrainedConfig | None = None,
    cost: CostModel | None = None,
    link: Link | None = None,
    bytes_per_token: float | None = None,
    num_layers: int | None = None,
) -> Partition:
    """
    Returns slice lengths from what a user gave.

    Args:
        partition (`str`, `tuple[int, ...]`, `tuple[float, ...]` or `PartitionTable`, *optional*):
            `"even"`; lengths that sum to `length`; ratios that sum to 1; a look-up table; `"planned"` or nothing for
            `planned` by `cost`, or by the shapes of `model` where there is none.
        length (`int`): tokens of the context.
        num_ranks (`int`): ranks there are; lengths and ratios may be fewer.
        model (`PreTrainedModel` or `PreTrainedConfig`, *optional*): for planning without `cost`.
        cost, link, bytes_per_token, num_layers (*optional*): as for `planned`; a link needs `cost`.

    Raises:
        ValueError: if `partition` is none of these, does not fit `length` or has more slices than there are ranks.
    """
    _check_length(length, num_ranks)
    if partition is None or partition == "planned":
        if cost is None:
            if model is None or link is not None:
                raise ValueError("`partition` is to be planned, for which `cost` is needed, or `model` and no `link`")
            cost = CostModel.of_shapes(model)
        return planned(length, num_ranks, cost, link=link, bytes_per_token=bytes_per_token, num_layers=num_layers)
    if partition == "even":
        return even(length, num_ranks)
    if isinstance(partition, PartitionTable):
        if partition.world_size != num_ranks:
            raise ValueError(f"`partition` is a table for {partition.world_size} ranks, but there are {num_ranks}")
        return predicted(length, partition)
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        raise ValueError(
            f"`partition` has to be one of {list(NAMES)}, slice lengths, ratios or a `PartitionTable`, but got "
            f"{partition!r}"
        )
    if len(partition) > num_ranks:
        raise ValueError(f"`partition` has {len(partition)} slices, but there are {num_ranks} ranks")
    ratios = tuple(each for each in partition if isinstance(each, float))
    if partition and len(ratios) == len(partition):
        return _by_ratios(length, check_ratios("partition", ratios))
    return _checked_lengths("partition", tuple(partition), length)


def even(length: int, num_ranks: int) -> Partition:
    """Cuts slices of one length, the first ones longer by a token where it does not divide."""
    _check_length(length, num_ranks)
    share, left = divmod(length, num_ranks)
    return tuple(share + (rank < left) for rank in range(num_ranks))


def predicted(length: int, table: PartitionTable) -> Partition:
    """
    Cuts slices by a look-up table: ratios interpolated linearly between the two nearest lengths.

    A length outside of the table takes the ratios of its nearest; so does one between entries of different numbers of
    slices.

    Raises:
        ValueError: if there are fewer tokens than ratios.
    """
    entries = table.entries
    above = next((index for index, entry in enumerate(entries) if entry.length >= length), len(entries) - 1)
    upper, lower = entries[above], entries[max(above - 1, 0)]
    if length >= upper.length:
        return _by_ratios(length, upper.ratios)
    if length <= lower.length:
        return _by_ratios(length, lower.ratios)
    weight = (length - lower.length) / (upper.length - lower.length)
    if len(lower.ratios) != len(upper.ratios):
        return _by_ratios(length, (upper if weight > 0.5 else lower).ratios)
    pairs = zip(lower.ratios, upper.ratios, strict=True)
    return _by_ratios(length, [first + weight * (second - first) for first, second in pairs])


def planned(
    length: int,
    num_ranks: int,
    cost: CostModel,
    *,
    link: Link | None = None,
    bytes_per_token: float | None = None,
    num_layers: int | None = None,
    allow_fewer: bool = True,
) -> Partition:
    """
    Cuts the slices that a cost model says are fastest.

    Without a link: equal compute time for every rank, by bisection over that time. With one: no rank may take longer
    over sending a layer than it has for computing one, then `searched` moves the boundaries by the simulated time to
    first token; and all that for every number of ranks.

    Args:
        length (`int`): tokens of the context.
        num_ranks (`int`): ranks there are.
        cost (`CostModel`): compute of a slice.
        link (`Link`, *optional*): between ranks; the two following options are needed with it.
        bytes_per_token (`float`, *optional*): bytes of keys and values of one token in one layer.
        num_layers (`int`, *optional*): layers of the model.
        allow_fewer (`bool`, *optional*, defaults to `True`): whether fewer ranks may be used, where that is faster.

    Raises:
        ValueError: if there are fewer tokens than ranks, or options are missing.
    """
    _check_length(length, num_ranks)
    if link is None:
        return _rounded(_balanced(length, num_ranks, cost))
    if bytes_per_token is None or num_layers is None:
        raise ValueError("`link` needs `bytes_per_token` and `num_layers`: without them it has no time of transfers")

    def predict(partitions: Sequence[Partition]) -> list[float]:
        lengths = np.array(partitions, dtype=np.float64)
        seconds: list[float] = predict_ttfts(lengths, cost, link, bytes_per_token, num_layers).tolist()
        return seconds

    def longest_prefix(seconds: float) -> float:
        return max(seconds / num_layers - link.latency, 0) * link.bytes_per_second / bytes_per_token

    starts: dict[Partition, float] = {}
    for count in range(1, num_ranks + 1):
        for form in (_balanced(length, count, cost), _balanced(length, count, cost, longest_prefix)):
            # Ranks that have to be used without need get a token each, first in the chain
            start = _rounded(form if allow_fewer else [0.0] * (num_ranks - count) + form)
            starts[start] = predict([start])[0]
    nearest = sorted(starts, key=starts.__getitem__)[:_NUM_SEARCHED]
    last_step = max(length // _FINEST, 1)
    found: dict[Partition, float] = {}
    for start in nearest:
        if starts[start] <= _NEAR * starts[nearest[0]]:
            lengths, seconds = _search(start, predict, max(length // (8 * len(start)), 1), last_step)
            found[lengths] = seconds
    enough = (1 + _WORTH_A_RANK) * min(found.values())
    return min((lengths for lengths, seconds in found.items() if seconds <= enough), key=len)


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
    Searches the paper's hierarchical grid: the result is never worse, by what was measured, than its start.

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
    _check_length(length, num_ranks)
    best = even(length, num_ranks) if start is None else _checked_lengths("start", tuple(start), length)
    if len(best) != num_ranks:
        raise ValueError(f"`start` has to have a slice for each of {num_ranks} ranks but got {list(best)}")
    step = max(1, length // (_STEP_DIVISOR * num_ranks)) if first_step is None else first_step
    last_step = max(1, length // 256) if last_step is None else last_step
    if step < 1 or last_step < 1:
        raise ValueError(f"`first_step` and `last_step` have to be at least 1 but got {step} and {last_step}")
    return _search(best, lambda partitions: map(measure, partitions), step, last_step)[0]


def _search(
    best: Partition, measure: Callable[[Sequence[Partition]], Iterable[float]], step: int, last_step: int
) -> tuple[Partition, float]:
    """Searches as `searched` does, `measure` being given all new partitions of a grid at once."""
    seconds: dict[Partition, float] = {}
    boundaries = tuple(range(len(best) - 1))
    # Moved one grid after the other: all boundaries, or each pair of neighbours
    moved = [boundaries]
    if len(_OFFSETS) ** len(boundaries) > _MAX_GRID:
        moved = list(itertools.pairwise(boundaries))
    while True:
        again = True
        while again:
            again = False
            for some in moved:
                # The middle first: of equally fast ones it stays
                tried = list(dict.fromkeys((best, *_grid(step, some, best))))
                new = [each for each in tried if each not in seconds]
                for lengths, time in zip(new, measure(new) if new else (), strict=True):
                    if math.isnan(time):
                        raise ValueError(f"`measure` has to return seconds but returned NaN for {list(lengths)}")
                    seconds[lengths] = time
                better = min(tried, key=seconds.__getitem__)
                again |= better != best
                best = better
        if step <= last_step:
            return best, seconds[best]
        step = max(step // _STEP_DIVISOR, last_step)


def _grid(step: int, boundaries: tuple[int, ...], middle: Partition) -> Iterator[Partition]:
    """Moves some boundaries by whole steps, and stretches the slices between these in proportion."""
    ends = list(itertools.accumulate(middle))
    for offsets in itertools.product(_OFFSETS, repeat=len(boundaries)):
        fixed = [(0, 0), *((ends[each], offset * step) for each, offset in zip(boundaries, offsets, strict=True))]
        parts = itertools.pairwise([*fixed, (ends[-1], 0)])
        scales = [1 + (move_2 - move_1) / (end - begin) for (begin, move_1), (end, move_2) in parts]
        if min(scales) > 0:
            groups = [sum(each < rank for each in boundaries) for rank in range(len(middle))]
            yield _rounded(length * scales[group] for length, group in zip(middle, groups, strict=True))


def _balanced(
    length: int, num_ranks: int, cost: CostModel, longest_prefix: Callable[[float], float] = lambda seconds: math.inf
) -> list[float]:
    """Cuts real slice lengths of equal, least seconds; `longest_prefix` of these bounds where the last one begins."""

    def cut(seconds: float) -> list[float]:
        lengths: list[float] = []
        prefix, longest = 0.0, longest_prefix(seconds)
        for rank in range(num_ranks):
            left = longest - prefix if rank < num_ranks - 1 else math.inf
            lengths.append(max(min(cost.length_within(seconds, prefix), left), 0.0))
            prefix += lengths[-1]
        return lengths

    least, enough = 0.0, cost.seconds(float(length), 0.0)
    for _ in range(_BISECTIONS):
        middle = (least + enough) / 2
        if sum(cut(middle)) < length:
            least = middle
        else:
            enough = middle
    lengths = cut(enough)
    # All within rounding of `length` but where one rank alone already is enough
    total = sum(lengths)
    return [each * length / total for each in lengths]


def _by_ratios(length: int, ratios: Sequence[float]) -> Partition:
    _check_length(length, len(ratios))
    return _rounded(ratio * length for ratio in ratios)


def _rounded(lengths: Iterable[float]) -> Partition:
    """Rounds the boundaries of real slice lengths to the nearest token, and makes each slice 1 at least."""
    ends = list(itertools.accumulate(lengths))
    length, boundaries = round(ends[-1]), [0]
    for left, end in zip(range(len(ends) - 1, -1, -1), ends, strict=True):
        boundaries.append(max(min(round(end), length - left), boundaries[-1] + 1))
    return tuple(end - begin for begin, end in itertools.pairwise(boundaries))


def _checked_lengths(name: str, lengths: tuple[object, ...], length: int) -> Partition:
    """Returns the lengths if they are integers above 0 that sum to `length`; else a `ValueError` names `name`."""
    whole = tuple(each for each in lengths if isinstance(each, int) and not isinstance(each, bool) and each >= 1)
    if not lengths or len(whole) < len(lengths):
        raise ValueError(f"`{name}` has to hold integers of at least 1, or ratios as floats, but got {list(lengths)}")
    if sum(whole) != length:
        raise ValueError(f"`{name}` has to sum to the context's {length} tokens but got {list(whole)}, {sum(whole)}")
    return whole


def _check_length(length: int, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"`num_ranks` has to be at least 1 but got {num_ranks}")
    if length < num_ranks:
        raise ValueError(
            f"the context has {length} tokens, but each of {num_ranks} ranks needs one at least: use fewer ranks"
        )
