"""Options of H2O, validated once and immutable afterwards, and the budgets that they stand for."""

import math
from dataclasses import dataclass

from kvcache_plugins.option_checks import check_bool, check_integer, check_number


# So that 0.29 of 100 tokens is 29 of them, whatever floating point makes of it
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class H2OConfig:
    """How many tokens are kept. See `H2OCache` for the meaning of each field."""

    heavy_ratio: float
    recent_ratio: float
    min_tokens: int
    grow: bool

    def __post_init__(self) -> None:
        for name in ("heavy_ratio", "recent_ratio"):
            check_number(name, getattr(self, name), above=0.0, most=1.0)
        # A heavy and a recent token
        check_integer("min_tokens", self.min_tokens, 2)
        check_bool("grow", self.grow)

    def budget(self, num_tokens: int, prompt_length: int) -> tuple[int, int]:
        """
        Tokens that a head keeps of `num_tokens`, in all and, of those, the newest.

        Args:
            num_tokens (`int`): tokens of the sequence so far, its padding not counted.
            prompt_length (`int`): those of them that came with the first update.
        """
        share = self.heavy_ratio + self.recent_ratio
        total = num_tokens
        if share < 1 - _ROUNDING:
            base = num_tokens if self.grow else min(prompt_length, num_tokens)
            total = min(num_tokens, max(math.floor(share * base + _ROUNDING), self.min_tokens))
        recent = math.floor(total * self.recent_ratio / share + _ROUNDING)
        # At least one is kept for its weight and one for being the newest
        return total, min(max(recent, 1), max(total - 1, 1))
