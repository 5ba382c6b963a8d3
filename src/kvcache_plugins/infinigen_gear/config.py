"""Options of how an `InfiniGenGEARCache` codes, validated once and immutable afterwards."""

from dataclasses import dataclass
from typing import Any

from kvcache_plugins.codecs.groups import SideCodec
from kvcache_plugins.codecs.quantization import SUPPORTED_NBITS, Grouping
from kvcache_plugins.gear.config import largest_divisor
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
        check_choice("value_nbits", self.value_nbits, SUPPORTED_NBITS)
        check_integer("q_group_size", self.q_group_size, 1, is_optional=True)

    def key_codec(self, head_dim: int) -> SideCodec:
        """Returns the codec of keys: no outliers and no low rank, as what is fetched has to be of one token alone."""
        grouping = Grouping("channel", self.token_group)
        return SideCodec(side="key", head_dim=head_dim, nbits=self.key_nbits, grouping=grouping)

    def value_codec(self, head_dim: int) -> SideCodec:
        """
        Returns the codec of values, the same.

        Raises:
            ValueError: if `q_group_size` does not divide the head dimension.
        """
        grouping = Grouping("token", self._channel_group(head_dim))
        return SideCodec(side="value", head_dim=head_dim, nbits=self.value_nbits, grouping=grouping, is_rotated=True)

    @property
    def token_group(self) -> int:
        """Tokens that share a scale in a channel of the keys."""
        return self.q_group_size or DEFAULT_GROUP_SIZE

    def _channel_group(self, head_dim: int) -> int:
        size = self.q_group_size or largest_divisor(head_dim, DEFAULT_GROUP_SIZE)
        if head_dim % size:
            accepted = [divisor for divisor in range(1, head_dim + 1) if head_dim % divisor == 0]
            raise ValueError(
                f"`q_group_size` has to divide the head dimension, {head_dim}, but got {size}; accepted: {accepted} "
                "or None"
            )
        return size


def check_options(
    *, key_nbits: int = 4, value_nbits: int = 4, q_group_size: int | None = None, **options: Any
) -> None:
    """Raises a `ValueError` for options of an `InfiniGenGEARCache` that no model makes right."""
    CodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, q_group_size=q_group_size)
    infinigen.check_options(**options)
