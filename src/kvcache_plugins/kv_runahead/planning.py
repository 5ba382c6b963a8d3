"""The partition that a cost model says is fastest, told without a measurement of any partition."""

import math
from collections.abc import Callable

import numpy as np

from .cost import CostModel
from .measurements import Array, Link
from .slices import Partition, check_length, rounded
from .time_to_first_token import predict_ttft, predict_ttfts


# Of the closed forms for different numbers of ranks, how many are refined by simulation, and how near to the best
_NUM_REFINED = 3
_NEAR = 1.1
# The share of the time that ranks have to save, or they are left free
_WORTH_A_RANK = 0.01
_BISECTIONS = 60
# What the tokens moved at once are divided by from level to level
_STEP_DIVISOR = 4


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
    The partition that a cost model says is fastest.

    Without a link: equal compute time for every rank, by bisection over that time. With one: no rank may take longer
    over sending a layer than it has for computing one, then the boundaries are moved while the simulated time to first
    token falls; and all that for every number of ranks.

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
    check_length(length, num_ranks)
    if link is None:
        return rounded(_balanced(length, num_ranks, cost))
    if bytes_per_token is None or num_layers is None:
        raise ValueError("`link` needs `bytes_per_token` and `num_layers`: without them it has no time of transfers")

    def predict(partitions: Array) -> Array:
        return predict_ttfts(partitions, cost, link, bytes_per_token, num_layers)

    def limit(seconds: float) -> float:
        """The longest prefix that can be sent in a layer's part of `seconds`."""
        return max(seconds / num_layers - link.latency, 0) * link.bytes_per_second / bytes_per_token

    def seconds(lengths: Partition) -> float:
        return predict_ttft(lengths, cost, link, bytes_per_token, num_layers)

    starts = []
    for count in range(1, num_ranks + 1):
        for form in (_balanced(length, count, cost), _balanced(length, count, cost, limit)):
            # Ranks that have to be used without need get a token each, first in the chain
            starts.append(rounded(form if allow_fewer else [0.0] * (num_ranks - count) + form))
    first, *others = sorted(set(starts), key=seconds)[:_NUM_REFINED]
    near = [start for start in others if seconds(start) <= _NEAR * seconds(first)]
    refined = [_refined(start, predict) for start in (first, *near)]
    enough = (1 + _WORTH_A_RANK) * min(map(seconds, refined))
    return min((lengths for lengths in refined if seconds(lengths) <= enough), key=len)


def _balanced(
    length: int, num_ranks: int, cost: CostModel, limit: Callable[[float], float] = lambda seconds: math.inf
) -> list[float]:
    """
    Real slice lengths of equal seconds, the least that suffice; `limit` bounds, by these seconds, where the last slice
    begins.
    """

    def cut(seconds: float) -> list[float]:
        lengths: list[float] = []
        prefix, longest = 0.0, limit(seconds)
        for rank in range(num_ranks):
            room = longest - prefix if rank < num_ranks - 1 else math.inf
            lengths.append(max(min(cost.length_within(seconds, prefix), room), 0.0))
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


def _refined(lengths: Partition, predict: Callable[[Array], Array]) -> Partition:
    """The partition after tokens were moved between slices while that makes it faster, ever fewer at once."""
    start = best = np.array(lengths, dtype=np.float64)
    seconds = float(predict(best[None])[0])
    step = int(best.sum()) // (8 * len(lengths)) if len(lengths) > 1 else 0
    while step >= 1:
        for _ in range(4 * len(lengths)):
            moves = step * _directions(best)
            candidates = np.concatenate([best + moves, best - moves])
            candidates = candidates[(candidates >= 1).all(axis=1)]
            if not len(candidates):
                break
            times = predict(candidates)
            index = int(times.argmin())
            # Less is rounding
            if not times[index] < seconds * (1 - 1e-9):
                break
            best, seconds = candidates[index], float(times[index])
        step //= _STEP_DIVISOR
    whole = rounded(best)
    before, after = predict(np.array([start, whole]))
    return whole if after < before else lengths


def _directions(lengths: Array) -> Array:
    """
    Ways to move a token: from a slice to the next, from a slice to the last, and from all slices before a boundary to
    all after it, in proportion. `[directions, num_ranks]`, summing to 0.

    The last is for neighbours of equal time: what one of them is rid of the other must not get.
    """
    num_ranks = len(lengths)
    rows = []
    for rank in range(num_ranks - 1):
        for other in {rank + 1, num_ranks - 1}:
            row = np.zeros(num_ranks)
            row[[rank, other]] = 1, -1
            rows.append(row)
        before, after = lengths[: rank + 1], lengths[rank + 1 :]
        rows.append(np.concatenate([before / before.sum(), -after / after.sum()]))
    return np.array(rows)
