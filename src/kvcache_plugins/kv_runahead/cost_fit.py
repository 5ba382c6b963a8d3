"""Fits the weights of a cost model to measured slices."""

import itertools
from collections.abc import Sequence

import numpy as np

from .measurements import Array, Timing


# What kernels compute of the square of a slice's own queries and keys, of which only the lower triangle is wanted
RECTANGLE = 1.0
TRIANGLE = 0.5


def fit_weights(timings: Sequence[Timing], triangle: float | None) -> tuple[float, float, float, float]:
    """
    `per_token`, `per_pair`, `fixed` and `triangle` of the `CostModel` nearest to the timings, see `CostModel.fit`.

    Raises:
        ValueError: if the timings are too few or too much alike, or do not grow with the length.
    """
    lengths = np.array([timing.length for timing in timings], dtype=np.float64)
    prefixes = np.array([timing.prefix for timing in timings], dtype=np.float64)
    seconds = np.array([timing.seconds for timing in timings], dtype=np.float64)
    if len({timing.length for timing in timings}) < 2:
        raise ValueError(
            f"`timings` has to hold slices of two lengths at least, but got {sorted(set(lengths.tolist()))}"
        )
    num_different = len({(timing.length, timing.prefix) for timing in timings})
    if triangle is None and (prefixes.all() or not prefixes.any() or num_different < 4):
        raise ValueError(
            "without `triangle`, `timings` has to hold four different slices, with and without a prefix; "
            f"give `triangle` ({RECTANGLE} or {TRIANGLE}) or measure more"
        )
    crossed, own = prefixes * lengths, lengths * lengths
    pairs = [crossed, own] if triangle is None else [crossed + triangle * own]
    columns = [lengths, *pairs, *([np.ones_like(lengths)] if num_different > 2 else [])]
    weights = _least_squares(np.stack(columns, axis=1) / seconds[:, None], np.ones_like(seconds))
    per_token, per_pair = weights[0], weights[1]
    fixed = weights[-1] if num_different > 2 else 0.0
    if triangle is None:
        if not (per_pair > 0 and weights[2] > 0):
            raise ValueError("`timings` do not tell `triangle`, as attention does not show in them: give it")
        triangle = weights[2] / per_pair
    if not per_token + per_pair > 0:
        raise ValueError("`timings` do not grow with the length: measure longer slices")
    return per_token, per_pair, fixed, triangle


def _least_squares(columns: Array, target: Array) -> list[float]:
    """
    The least-squares weights of `columns` `[rows, columns]`, none negative.

    There are four columns at most, so every choice of columns that may be above zero is tried, smaller ones first: a
    column that only fits rounding stays zero.
    """
    # Squares of lengths beside lengths and ones: unscaled, `lstsq` would take the small ones for nothing
    scales = np.linalg.norm(columns, axis=0)
    scaled = columns / np.where(scales > 0, scales, 1)
    best, least = np.zeros(columns.shape[1]), float(target @ target)
    worth = 1e-12 * least
    for count in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), count):
            part = scaled[:, list(chosen)]
            weights, _, rank, _ = np.linalg.lstsq(part, target, rcond=None)
            error = float(np.square(part @ weights - target).sum())
            if rank == count and (weights >= 0).all() and error < least - worth:
                best, least = np.zeros(columns.shape[1]), error
                best[list(chosen)] = weights / scales[list(chosen)]
    return [float(weight) for weight in best]
