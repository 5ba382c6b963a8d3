"""What a cache remembers of having been chosen by measuring: see `kvcache_plugins.choose_cache`."""

from dataclasses import dataclass

from kvcache_plugins.reports.memory import StatValue


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetChoice:
    """
    Why a cache is what it is.

    Attributes:
        preset (`str`): a name of `list_caches()`, or `name:key=value,...` with options.
        kl (`float`): its mean KL(dense || cache) over the held-out tokens, in nats.
        max_kl (`float`): the bound that it had to meet.
        kl_by_preset (`dict[str, float]`): the same of every candidate that was tried, the cheapest first.
    """

    preset: str
    kl: float
    max_kl: float
    kl_by_preset: dict[str, float]

    def stats(self) -> dict[str, StatValue]:
        """The entries of `GEARCache.stats()`."""
        return {
            "chosen_preset": self.preset,
            "chosen_kl": self.kl,
            "max_kl": self.max_kl,
            "kl_by_preset": dict(self.kl_by_preset),
        }
