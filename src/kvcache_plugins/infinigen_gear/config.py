"""Options of how an `InfiniGenGEARCache` codes, validated once and immutable afterwards."""

from dataclasses import dataclass
from typing import Any

from kvcache_plugins.gear.config import SideConfig, largest_divisor
from kvcache_plugins.infinigen import config as infinigen
from kvcache_plugins.option_checks import check_choice, check_integer


# Kernels that score codes take these
KEY_NBITS = (2, 4, 8)
DEFAULT_GROUP_SIZE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CodingConfig:
    """The options of `InfiniGenGEARCache` that are not InfiniGen's. See there for their meaning."""

    key_nbits: int
    value_nbits: int
    q_group_size: int | None

    def __post_init__(self) -> None:
        check_choice("key_nbits", self.key_nbits, KEY_NBITS)
        check_integer("q_group_size", self.q_group_size, 1, is_optional=True)
        # Values' bits are checked with them
        self.value  # noqa: B018

    @property
    def key(self) -> SideConfig:
        """Options of the keys' codes."""
        return _codes_alone("key", self.key_nbits)

    @property
    def value(self) -> SideConfig:
        """Options of the values' codes."""
        return _codes_alone("value", self.value_nbits)

    @property
    def token_group(self) -> int:
        """Tokens that share a scale in a channel of the keys."""
        return self.q_group_size or DEFAULT_GROUP_SIZE

    def channel_group(self, head_dim: int) -> int:
        """
        Channels of a value that share a scale.

        Raises:
            ValueError: if `q_group_size` does not divide the head dimension.
        """
        size = self.q_group_size or largest_divisor(head_dim, DEFAULT_GROUP_SIZE)
        if head_dim % size:
            accepted = [divisor for divisor in range(1, head_dim + 1) if head_dim % divisor == 0]
            raise ValueError(
                f"`q_group_size` has to divide the head dimension, {head_dim}, but got {size}; accepted: {accepted} "
                "or None"
            )
        return size


def _codes_alone(side: str, nbits: int) -> SideConfig:
    """No outliers and no low rank: what is fetched token by token has to be of one token alone."""
    return SideConfig(side=side, nbits=nbits, backbone="kivi", sparsity=0.0, rank=0, decode_rank=0)


def check_options(
    *, key_nbits: int = 4, value_nbits: int = 4, q_group_size: int | None = None, **options: Any
) -> None:
    """Raises a `ValueError` for options of an `InfiniGenGEARCache` that no model makes right."""
    CodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, q_group_size=q_group_size)
    infinigen.check_options(**options)
