"""Options of H2O, validated once and immutable afterwards, and the budgets that they stand for."""

import math
from dataclasses import dataclass


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
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
                raise ValueError(f"`{name}` has to be a number in (0, 1] but got {value!r}")
        # A heavy and a recent token
        if not isinstance(self.min_tokens, int) or isinstance(self.min_tokens, bool) or self.min_tokens < 2:
            raise ValueError(f"`min_tokens` has to be an integer of at least 2 but got {self.min_tokens!r}")
        if not isinstance(self.grow, bool):
            raise ValueError(f"`grow` has to be one of [`True`, `False`] but got {self.grow!r}")

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
