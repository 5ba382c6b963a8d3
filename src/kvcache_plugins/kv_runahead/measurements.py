"""What is measured before a prefill is planned: how long slices take, and how fast a link is."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache_plugins.option_checks import check_bool, check_integer, check_number


Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)


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
    What passes from one rank to the next.

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
        """Seconds that a message of so many bytes keeps the link busy."""
        return num_bytes / self.bytes_per_second + self.latency
