"""What a slice of a prompt costs: compute that grows with its length, and with the prefix that it attends to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.option_checks import check_number

from .cost_fit import RECTANGLE, TRIANGLE, fit_weights
from .measurements import Link, Number, Timing
from .operations import count_operations


__all__ = ["RECTANGLE", "TRIANGLE", "CostModel", "Link", "Timing"]

# Of a layer's linear work, what it takes until keys and values are known; Llama 7B has 0.249
_PROJECTION_SHARE = 0.25


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
        """Seconds of a slice, or of an array of slices."""
        return self.fixed + length * (self.per_token + self.per_pair * (prefix + self.triangle * length))

    def projection_seconds(self, length: Number) -> Number:
        """The part of `seconds` that comes before keys and values can be sent: it does not depend on the prefix."""
        return self.projection_share * (self.fixed + self.per_token * length)

    def length_within(self, seconds: float, prefix: float) -> float:
        """The longest slice behind a prefix that takes no longer than `seconds`; a real number, 0 if none does."""
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
        The cost model nearest to measured timings, in relative error, with no negative part.

        Args:
            timings (`Sequence[Timing]`):
                Slices of two lengths at least; `fixed` can be told from three different slices, and is 0 with two.
            triangle (`float`, *optional*):
                See `CostModel`. Fitted too if not given, for which slices with and without a prefix are needed.
            projection_share (`float`, *optional*, defaults to 0.25): see `CostModel`; timings do not tell it.

        Raises:
            ValueError: if the timings are too few or too much alike, or do not grow with the length.
        """
        per_token, per_pair, fixed, triangle = fit_weights(timings, triangle)
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
        The cost model that counts floating-point operations, for use without any measurement.

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
