"""Seconds of a prefill: of one slice of a prompt, and of slices on a chain of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.option_checks import check_bool, check_integer, check_number

from .operations import count_operations


Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)
# What kernels compute of the square of a slice's own queries and keys, of which only the lower triangle is wanted
RECTANGLE = 1.0
TRIANGLE = 0.5
# Of a layer's linear work, what it takes until keys and values are known; Llama 7B has 0.249
_PROJECTION_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """
    A measured prefill of one slice on one process.

    Attributes:
        length (`int`): tokens of the slice.
        prefix (`int`): tokens before it, whose keys and values were in the cache.
        seconds (`float`): through all layers.
    """

    length: int
    prefix: int = 0
    seconds: float

    def __post_init__(self) -> None:
        check_integer("length", self.length, 1)
        check_integer("prefix", self.prefix, 0)
        check_number("seconds", self.seconds, above=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """
    The link from one rank to the next.

    Attributes:
        latency (`float`): seconds a message takes beside its bytes.
        bytes_per_second (`float`): of one link, in one direction.
        shared (`bool`): whether all ranks share it, as over one host's bus; else every rank has its own to the next.
    """

    latency: float = 0.0
    bytes_per_second: float
    shared: bool = False

    def __post_init__(self) -> None:
        check_number("latency", self.latency, least=0.0)
        check_number("bytes_per_second", self.bytes_per_second, above=0.0)
        check_bool("shared", self.shared)

    def seconds(self, num_bytes: Number) -> Number:
        """Returns the seconds that a message of `num_bytes` keeps the link busy."""
        return num_bytes / self.bytes_per_second + self.latency


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """
    Seconds of a slice of `c` tokens behind a prefix of `b`, through all layers of a model:

        fixed + per_token * c + per_pair * (b * c + triangle * c * c)

    Attributes:
        per_token (`float`): seconds a token: linear layers.
        per_pair (`float`): seconds a pair of a query and a key: attention.
        fixed (`float`): seconds a prefill of any length.
        triangle (`float`):
            Share of the `c * c` pairs within the slice that is computed: `RECTANGLE` as in the paper, where everything
            is computed and then masked, `TRIANGLE` for kernels that skip what is masked.
        projection_share (`float`):
            Part of `fixed` and `per_token` that comes before a layer's keys and values can be sent.
    """

    per_token: float
    per_pair: float
    fixed: float = 0.0
    triangle: float = TRIANGLE
    projection_share: float = _PROJECTION_SHARE

    def __post_init__(self) -> None:
        for name in ("per_token", "per_pair", "fixed"):
            check_number(name, getattr(self, name), least=0.0)
        check_number("triangle", self.triangle, above=0.0)
        check_number("projection_share", self.projection_share, least=0.0, most=1.0)
        if not self.per_token + self.per_pair > 0:
            raise ValueError("one of `per_token` and `per_pair` has to be above 0, but both are 0")

    def seconds(self, length: Number, prefix: Number) -> Number:
        """Returns the seconds of a slice, or of an array of slices."""
        return self.fixed + length * (self.per_token + self.per_pair * (prefix + self.triangle * length))

    def length_within(self, seconds: float, prefix: float) -> float:
        """Returns the longest slice behind `prefix` that takes at most `seconds`: a real number, 0 if none does."""
        left = seconds - self.fixed
        if left <= 0:
            return 0.0
        slope = self.per_token + self.per_pair * prefix
        # The root of a quadratic in the form that also serves where it is nearly linear
        return 2 * left / (slope + math.sqrt(slope * slope + 4 * self.per_pair * self.triangle * left))

    @classmethod
    def fit(
        cls,
        timings: Sequence[Timing],
        *,
        triangle: float | None = None,
        projection_share: float = _PROJECTION_SHARE,
    ) -> CostModel:
        """
        Fits the cost model to measured timings: the least relative error with no negative part.

        Args:
            timings (`Sequence[Timing]`):
                Slices of two lengths at least; `fixed` can be told from three different slices, and is 0 with two.
            triangle (`float`, *optional*):
                See `CostModel`. Fitted too if not given, for which slices with and without a prefix are needed.
            projection_share (`float`, *optional*, defaults to 0.25): see `CostModel`; timings do not tell it.

        Raises:
            ValueError: if the timings are too few or too much alike, or do not grow with the length.
        """
        rows = [(timing.length, timing.prefix, timing.seconds) for timing in timings]
        lengths, prefixes, seconds = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        if len(set(lengths)) < 2:
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
        per_token, per_pair, *more = _least_squares(np.stack(columns, axis=1) / seconds[:, None])
        fixed = more.pop() if num_different > 2 else 0.0
        if triangle is None:
            if not (per_pair > 0 and more[0] > 0):
                raise ValueError("`timings` do not tell `triangle`, as attention does not show in them: give it")
            triangle = more[0] / per_pair
        if not per_token + per_pair > 0:
            raise ValueError("`timings` do not grow with the length: measure longer slices")
        return cls(
            per_token=per_token,
            per_pair=per_pair,
            fixed=fixed,
            triangle=triangle,
            projection_share=projection_share,
        )

    @classmethod
    def of_shapes(
        cls,
        model: PreTrainedModel | PreTrainedConfig,
        *,
        triangle: float = TRIANGLE,
        flops_per_second: float = 1.0,
    ) -> CostModel:
        """
        Counts floating-point operations of a model, for planning without any measurement.

        Linear layers of the decoder (of experts, those that a token goes through) and attention are counted; a layer
        with a sliding window costs its whole window for every token. Hardware that does attention less efficiently
        than linear layers wants longer first slices than this says.

        Args:
            model (`PreTrainedModel` or `PreTrainedConfig`):
                A model, which is not run, or its config, from which an empty one is made (up to a second).
            triangle (`float`, *optional*, defaults to 0.5): see `CostModel`.
            flops_per_second (`float`, *optional*, defaults to 1.0):
                Operations a second. With the default "seconds" are operations: fit for ratios between slices, and
                meaningless beside the seconds of a link.
        """
        check_number("flops_per_second", flops_per_second, above=0.0)
        counts = count_operations(model)
        return cls(
            per_token=counts.per_token / flops_per_second,
            per_pair=counts.per_pair / flops_per_second,
            triangle=triangle,
            projection_share=min(counts.projections / counts.per_token, 1.0),
        )


def _least_squares(columns: Array) -> list[float]:
    """
    Fits weights of `columns` `[rows, columns]`, none negative, to a sum of 1 in every row.

    There are four columns at most, so every choice of columns that may be above zero is tried, smaller ones first: a
    column that only fits rounding stays zero.
    """
    # Squares of lengths beside lengths and ones: unscaled, `lstsq` would take the small ones for nothing
    scales = np.linalg.norm(columns, axis=0)
    scaled, target = columns / np.where(scales > 0, scales, 1), np.ones(len(columns))
    best, least = np.zeros(columns.shape[1]), float(len(columns))
    worth = 1e-12 * least
    for count in range(1, columns.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(columns.shape[1]), count)):
            weights, _, rank, _ = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)
            error = float(np.square(scaled[:, chosen] @ weights - target).sum())
            if rank == count and (weights >= 0).all() and error < least - worth:
                best, least = np.zeros(columns.shape[1]), error
                best[chosen] = weights / scales[chosen]
    return [float(weight) for weight in best]


def predict_ttft(
    lengths: Sequence[int], cost: CostModel, link: Link, bytes_per_token: float, num_layers: int
) -> float:
    """
    Simulates the seconds until the last of a chain of ranks has the last token's hidden state.

    In every layer a rank projects the keys and values of its slice, waits for those of everything before it, sends
    both on, and attends.

    Args:
        lengths (`Sequence[int]`): tokens of each rank's slice, first rank first.
        cost (`CostModel`): compute of a slice through all layers, of which every layer takes the same part.
        link (`Link`): from each rank to the next; a rank sends one message at a time, and computes meanwhile.
        bytes_per_token (`float`): bytes of the keys and values of one token in one layer, see `bytes_of_token`.
        num_layers (`int`): layers of the model.
    """
    return float(predict_ttfts(np.array([lengths], dtype=np.float64), cost, link, bytes_per_token, num_layers)[0])


def predict_ttfts(lengths: Array, cost: CostModel, link: Link, bytes_per_token: float, num_layers: int) -> Array:
    """Simulates many partitions at once: `predict_ttft` of `[num_partitions, num_ranks]` to `[num_partitions]`."""
    num_partitions, num_ranks = lengths.shape
    ends = lengths.cumsum(axis=1)
    # Keys and values of a slice do not depend on the prefix
    projecting = cost.projection_share * (cost.fixed + cost.per_token * lengths) / num_layers
    attending = cost.seconds(lengths, ends - lengths) / num_layers - projecting
    sending = link.seconds(ends * bytes_per_token)
    # When a rank has done a layer, when its link is free again, and when its prefix is there
    done, sent, arrived = (np.zeros((num_partitions, num_ranks)) for _ in range(3))
    # A wave: in step `s` rank `i` is in layer `s - i`, so everything that it waits for belongs to the step before
    for step in range(num_layers + num_ranks - 1):
        active = slice(max(0, step - num_layers + 1), min(num_ranks, step + 1))
        ready = np.maximum(done[:, active] + projecting[:, active], arrived[:, active])
        sent[:, active] = np.maximum(ready, sent[:, active]) + sending[:, active]
        done[:, active] = ready + attending[:, active]
        arrived[:, 1:] = sent[:, :-1]
    if link.shared:
        # A bound, as if the link were never idle: who sends when is not simulated
        return np.maximum(done[:, -1], num_layers * sending[:, :-1].sum(axis=1))
    return done[:, -1]
