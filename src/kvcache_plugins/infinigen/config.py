"""Options of InfiniGen, validated once and immutable afterwards."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcache_plugins.option_checks import check_bool, check_choice, check_integer, check_number

from .pool import EVICTIONS


SKEWINGS = ("none", "query-svd")
SCORING_NBITS = (2, 4, 8)
# Default rule
DEFAULT_MIN_WEIGHT = 0.5
DEFAULT_SCORING_NBITS = 4
DEFAULT_EVICTION = "counter"
# The paper's first speculated layer is the third: inputs of the first two layers differ too much from the one before
NUM_FIRST_LAYERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class InfiniGenConfig:
    """Options of an `InfiniGenCache`, without the model, its calibration and a mask; see the class for each."""

    min_weight: float | None = None
    alpha: float | None = None
    max_fetch_ratio: float = 0.2
    scoring_nbits: int | None = None
    partial_ratio: float | None = None
    skewing: str | None = None
    recent: int = 32
    sink: int = 4
    pool_tokens: int | None = None
    eviction: str | None = None
    full_layers: tuple[int, ...] | None = None
    speculate: bool | None = None

    def __post_init__(self) -> None:
        if self.min_weight is not None and self.alpha is not None:
            raise ValueError(
                f"only one of `min_weight` and `alpha` can be given, but got {self.min_weight} and {self.alpha}"
            )
        if self.min_weight is None and self.alpha is None:
            object.__setattr__(self, "min_weight", DEFAULT_MIN_WEIGHT)
        for name in ("min_weight", "alpha"):
            check_number(name, getattr(self, name), above=0.0, is_finite=False, is_optional=True)
        check_number("partial_ratio", self.partial_ratio, above=0.0, most=1.0, is_optional=True)
        check_number("max_fetch_ratio", self.max_fetch_ratio, above=0.0, most=1.0)
        self._check_scoring()
        check_integer("recent", self.recent, 1)
        check_integer("sink", self.sink, 0)
        check_integer("pool_tokens", self.pool_tokens, 1, is_optional=True)
        if self.pool_tokens is not None and self.pool_tokens <= self.sink:
            raise ValueError(
                f"`pool_tokens` has to be more than the `sink` tokens that are never evicted, {self.sink}, but got "
                f"{self.pool_tokens}"
            )
        if self.full_layers is not None:
            layers = self.full_layers
            if not isinstance(layers, Sequence | Set) or isinstance(layers, str):
                raise ValueError(f"`full_layers` has to be a tuple of layers' indices or None but got {layers!r}")
            for index in layers:
                check_integer("full_layers", index, 0)
            object.__setattr__(self, "full_layers", tuple(layers))
        check_choice("eviction", self.eviction, (*EVICTIONS, None))
        if self.eviction is None:
            object.__setattr__(self, "eviction", DEFAULT_EVICTION)
        elif self.pool_tokens is None:
            raise ValueError(
                "`eviction` chooses the tokens that leave a full pool: it needs `pool_tokens`, but got "
                f"{self.eviction!r} without"
            )
        check_bool("speculate", self.speculate, is_optional=True)

    def _check_scoring(self) -> None:
        is_partial = self.partial_ratio is not None
        if self.skewing is not None and not is_partial:
            raise ValueError(
                "`skewing` rotates keys before some of their columns are kept: it needs `partial_ratio`, but got "
                f"{self.skewing!r} without"
            )
        if self.scoring_nbits is not None and is_partial:
            raise ValueError(
                "`scoring_nbits` (keys of all columns in a few bits) and `partial_ratio` (some columns in full "
                f"precision) exclude each other, but got {self.scoring_nbits} and {self.partial_ratio}"
            )
        name, default = ("skewing", "none") if is_partial else ("scoring_nbits", DEFAULT_SCORING_NBITS)
        if getattr(self, name) is None:
            object.__setattr__(self, name, default)
        check_choice(name, getattr(self, name), SKEWINGS if is_partial else SCORING_NBITS)

    def speculates_on(self, device: torch.device) -> bool:
        """Return whether tokens are chosen ahead for a model on a device: by default where transfers can be hidden."""
        if self.speculate is not None:
            return self.speculate
        return device.type != "cpu"


def check_options(*, calibration: object = None, attention_mask: object = None, **options: Any) -> None:
    """Raise a `ValueError` for options of an `InfiniGenCache` that are wrong for every model."""
    InfiniGenConfig(**options)
    if isinstance(calibration, str | Path) and not Path(calibration).is_file():
        raise ValueError(f"`calibration` is `{calibration}`, but there is no such file")
