"""Policies of layers: how many tokens stay exact, when the others are packed, and the codec that packs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.codecs.groups import GroupCodec


AnyCodec = TypeVar("AnyCodec", Codec, GroupCodec)
# Recent tokens that are requantized at a time, at most
_MOST_REQUANTIZED = 32


@dataclass(frozen=True)
class LayerPolicy(Generic[AnyCodec]):
    """
    Options of a layer.

    Attributes:
        make_codec (`Callable`): makes the codec of heads of some key and value dimensions, not fitted yet.
        residual_length (`int`): decoded tokens that stay exact until they are packed; 0 packs tokens as they come.
        num_sink_tokens (`int`): first tokens of a sequence that stay exact.
        least_tokens (`int`): tokens of the shortest sequence that is packed.
        num_recorded_queries (`int`): tokens before the first packing whose queries are recorded to fit the codec.
    """

    make_codec: Callable[[int, int], AnyCodec]
    residual_length: int = 0
    num_sink_tokens: int = 0
    least_tokens: int = 1
    num_recorded_queries: int = 0

    def codec(self, key_dim: int, value_dim: int) -> AnyCodec:
        """Make the codec of a layer's heads, not fitted yet; a `ValueError` if options do not fit them."""
        if not key_dim or not value_dim:
            # Latent attention without a rotary part has values without channels
            raise ValueError(
                f"keys of {key_dim} and values of {value_dim} channels cannot be coded: choose `infinigen`, `h2o` or "
                "`dynamic` for this model"
            )
        return self.make_codec(key_dim, value_dim)

    @property
    def num_kept(self) -> int:
        """Newest tokens of a full tail that stay exact when the others are packed."""
        return 0


@dataclass(frozen=True)
class RowPolicy(LayerPolicy[Codec]):
    """
    Options of a layer that packs every token as a row of bytes of its own.

    Attributes:
        shared_codec (`Codec`, *optional*): codec that all caches of a model share, instead of `make_codec`'s.
        recent_length (`int`): largest number of newest packed decoded tokens whose rows have more bits.
        recent_nbits (`int`): additional bits a number of recent rows.
        largest (`float`): exclusive bound on the magnitude of keys and values.
        keeps_whole_tail (`bool`): True if exactly `residual_length` decoded tokens are exact at any time.
    """

    shared_codec: Codec | None = None
    recent_length: int = 0
    recent_nbits: int = 0
    largest: float = float("inf")
    keeps_whole_tail: bool = False

    def codec(self, key_dim: int, value_dim: int) -> Codec:
        """Return the shared codec, or a new one; a `ValueError` if options do not fit the head dimensions."""
        return super().codec(key_dim, value_dim) if self.shared_codec is None else self.shared_codec

    @property
    def num_kept(self) -> int:
        if self.keeps_whole_tail:
            return self.residual_length
        # The newest tokens are read most: with tails that are emptied whole, KL is a quarter to a half higher
        return self.residual_length // 4 if self.recent_length else 3 * self.residual_length // 5

    @property
    def num_recent_kept(self) -> int:
        """Recent rows that keep their bits when there are more than `recent_length`."""
        return max(self.recent_length // 2, self.recent_length - _MOST_REQUANTIZED)


@dataclass(frozen=True)
class GroupPolicy(LayerPolicy[GroupCodec]):
    """
    Options of a layer that packs tokens in chunks, whose groups share scales.

    Attributes:
        least_tokens (`int`): tokens of a group of keys.
        has_whole_groups (`bool`): True if only whole groups of a prompt are packed.
    """

    has_whole_groups: bool = False
