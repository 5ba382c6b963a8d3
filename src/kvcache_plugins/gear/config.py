"""Options of GEAR, validated and immutable."""

from dataclasses import asdict, dataclass
from typing import Any

from kvcache_plugins.codecs.groups import GroupCodec, SideCodec
from kvcache_plugins.codecs.quantization import SUPPORTED_NBITS
from kvcache_plugins.formats.groups import Grouping
from kvcache_plugins.layers.policies import GroupPolicy
from kvcache_plugins.option_checks import check_bool, check_choice, check_integer, check_number


BACKBONES = ("kcvt", "kivi", "per-token")
_DEFAULT_GROUP_SIZE = 64
# Fewest bits for scales of whole channels; with fewer bits groups of tokens share scales
_MIN_KCVT_NBITS = 4
# The factors converge after a few iterations; a forged file could ask for many
_MAX_NUM_ITERATIONS = 1000
DEFAULT_DECODE_RANK = 2
# Default bits of keys and of values
DEFAULT_NBITS = (4, 4)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GEARConfig:
    """Options of a `GEARCache`, where each field is explained."""

    key_nbits: int = DEFAULT_NBITS[0]
    value_nbits: int = DEFAULT_NBITS[1]
    backbone: str | None = None
    q_group_size: int | None = None
    residual_length: int = 64
    sparsity: float = 0.02
    rank: int = 4
    decode_rank: int = DEFAULT_DECODE_RANK
    num_iterations: int = 3
    num_sink_tokens: int = 0
    rotate_values: bool = False

    def __post_init__(self) -> None:
        check_choice("key_nbits/nbits", self.key_nbits, SUPPORTED_NBITS)
        check_choice("value_nbits/nbits", self.value_nbits, SUPPORTED_NBITS)
        if self.backbone is not None:
            check_backbone(self.backbone)
        check_integer("q_group_size", self.q_group_size, 1, is_optional=True)
        check_integer("residual_length", self.residual_length, 1)
        check_number("sparsity", self.sparsity, least=0.0, below=1.0)
        check_integer("rank", self.rank, 0)
        check_integer("decode_rank", self.decode_rank, 0)
        check_integer("num_iterations", self.num_iterations, 1)
        if self.num_iterations > _MAX_NUM_ITERATIONS:
            raise ValueError(
                f"`num_iterations` has to be at most {_MAX_NUM_ITERATIONS} but got {self.num_iterations!r}"
            )
        check_integer("num_sink_tokens", self.num_sink_tokens, 0)
        check_bool("rotate_values", self.rotate_values)
        if self.has_token_groups and self.residual_length % self.token_group != 0:
            raise ValueError(
                f"`q_group_size` has to divide `residual_length` ({self.residual_length}) when keys use the `kivi` "
                f"backbone, but got {self.q_group_size}; accepted: the divisors of {self.residual_length}"
            )
        self._check_ranks(self.token_group, self.residual_length, "the fewest tokens compressed at once")

    def _check_ranks(self, most: int, most_decoded: int, limit: str) -> None:
        """Raise a `ValueError` if a rank is above its maximum, which `limit` describes."""
        for name, value, largest in (("rank", self.rank, most), ("decode_rank", self.decode_rank, most_decoded)):
            if value > largest:
                raise ValueError(f"`{name}` has to be at most {largest}, {limit}, but got {value}")

    def to_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `GEARCache` that make the same cache."""
        return asdict(self)

    @property
    def key_backbone(self) -> str:
        """Grouping of keys."""
        return self.backbone or _default_backbone(self.key_nbits)

    @property
    def value_backbone(self) -> str:
        """Grouping of values."""
        return self.backbone or _default_backbone(self.value_nbits)

    @property
    def has_token_groups(self) -> bool:
        """True if keys are quantized in groups of tokens."""
        return self.key_backbone == "kivi"

    @property
    def token_group(self) -> int:
        """Number of tokens that share a scale of `kivi` keys."""
        return self.q_group_size or largest_divisor(self.residual_length, _DEFAULT_GROUP_SIZE)

    @property
    def shortest_prompt(self) -> int:
        """Number of tokens of the shortest prompt that is compressed."""
        return self.token_group

    def policy(self) -> GroupPolicy:
        """Make the policy of a layer."""
        return GroupPolicy(
            GEARCodecs(self),
            residual_length=self.residual_length,
            num_sink_tokens=self.num_sink_tokens,
            least_tokens=self.token_group,
            has_whole_groups=self.has_token_groups,
        )

    def codec(self, key_head_dim: int, value_head_dim: int) -> GroupCodec:
        """Make the codec of heads of these dimensions; a `ValueError` if an option does not fit them."""
        for head_dim in (key_head_dim, value_head_dim):
            self._check_ranks(head_dim, head_dim, "the head dimension")
        keys = self._side_codec("key", self.key_nbits, self._key_grouping(key_head_dim), key_head_dim)
        values = self._side_codec("value", self.value_nbits, self._value_grouping(value_head_dim), value_head_dim)
        return GroupCodec(keys=keys, values=values)

    def _key_grouping(self, head_dim: int) -> Grouping:
        if self.key_backbone == "per-token":
            return self._channel_groups(head_dim)
        return Grouping("channel", self.token_group if self.has_token_groups else None)

    def _value_grouping(self, head_dim: int) -> Grouping:
        return Grouping("token", None) if self.value_backbone == "kcvt" else self._channel_groups(head_dim)

    def _channel_groups(self, head_dim: int) -> Grouping:
        """Return groups of a token's channels that share a scale."""
        group_size = self.q_group_size or largest_divisor(head_dim, _DEFAULT_GROUP_SIZE)
        if head_dim % group_size:
            accepted = [divisor for divisor in range(1, head_dim + 1) if head_dim % divisor == 0]
            raise ValueError(
                f"`q_group_size` has to divide the head dimension, {head_dim}, for the chosen `backbone`, but got "
                f"{group_size}; accepted: {accepted} or None"
            )
        return Grouping("token", group_size)

    def _side_codec(self, side: str, nbits: int, grouping: Grouping, head_dim: int) -> SideCodec:
        is_key = side == "key"
        return SideCodec(
            side=side,
            head_dim=head_dim,
            nbits=nbits,
            grouping=grouping,
            sparsity=self.sparsity,
            rank=self.rank,
            decode_rank=self.decode_rank,
            num_iterations=self.num_iterations,
            is_rotated=self.rotate_values and not is_key,
            # Rotary embeddings rotate keys by their positions, so errors of keys have no common part
            spreads_errors=not is_key,
        )


@dataclass(frozen=True, slots=True)
class GEARCodecs:
    """Factory of a layer's codecs. Equal options make equal factories, and so equal policies."""

    config: GEARConfig

    def __call__(self, key_dim: int, value_dim: int) -> GroupCodec:
        return self.config.codec(key_dim, value_dim)


def check_backbone(backbone: object) -> None:
    """Raise a `ValueError` unless `backbone` is a grouping of GEAR."""
    if backbone == "transform":
        raise ValueError(
            '`backbone="transform"` is a cache of its own now: `TransformCodingCache`, preset `transform`'
        )
    if backbone == "kvarn":
        raise ValueError('`backbone="kvarn"` is a cache of its own now: `KVarNCache`, presets `kvarn-*`')
    check_choice("backbone", backbone, BACKBONES)


def _default_backbone(nbits: int) -> str:
    return "kcvt" if nbits >= _MIN_KCVT_NBITS else "kivi"
