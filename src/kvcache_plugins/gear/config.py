"""Options of GEAR, validated once and immutable afterwards."""

from dataclasses import dataclass, fields
from typing import Any

from kvcache_plugins.codecs.groups import GroupCodec, SideCodec
from kvcache_plugins.codecs.quantization import SUPPORTED_NBITS, Grouping
from kvcache_plugins.layers.packing import GroupPacking
from kvcache_plugins.option_checks import check_bool, check_choice, check_integer, check_number
from kvcache_plugins.reports.memory import StatValue


BACKBONES = ("kcvt", "kivi", "per-token", "kvarn")
# What is done with layers whose attention has a window
SLIDING = ("auto", "compressed", "dense")
_DEFAULT_GROUP_SIZE = 64
# After a few nothing changes; without an end a forged file could keep a process busy for years
_MAX_NUM_ITERATIONS = 1000
_DEFAULT_DECODE_RANK = 2
# Of the options that keys and values may have of their own
_OF_SIDES: dict[str, Any] = {"nbits": 4, "backbone": None, "sparsity": 0.02, "rank": 4, "decode_rank": None}


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is not above `limit`."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideConfig:
    """How one side, keys or values, is compressed. See `GEARCache` for the meaning of each field."""

    side: str
    nbits: int
    backbone: str
    sparsity: float
    rank: int
    decode_rank: int

    def __post_init__(self) -> None:
        check_choice(f"{self.side}_nbits/nbits", self.nbits, SUPPORTED_NBITS)
        check_choice(f"{self.side}_backbone/backbone", self.backbone, BACKBONES)
        check_number(f"{self.side}_sparsity/sparsity", self.sparsity, least=0.0, below=1.0)
        check_integer(f"{self.side}_rank/rank", self.rank, 0)
        check_integer(f"{self.side}_decode_rank/decode_rank", self.decode_rank, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GEARConfig:
    """All options of a `GEARCache`, with one `SideConfig` for keys and one for values."""

    key: SideConfig
    value: SideConfig
    q_group_size: int | None = None
    residual_length: int = 64
    num_iterations: int = 3
    low_rank_recent_ratio: float = 1.0
    num_sink_tokens: int = 0
    rotate_values: bool = False
    sliding: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("residual_length", 1), ("num_iterations", 1), ("num_sink_tokens", 0)):
            check_integer(name, getattr(self, name), least)
        if self.num_iterations > _MAX_NUM_ITERATIONS:
            raise ValueError(
                f"`num_iterations` has to be at most {_MAX_NUM_ITERATIONS} but got {self.num_iterations!r}"
            )
        check_bool("rotate_values", self.rotate_values)
        if (self.key.side, self.value.side) != ("key", "value"):
            raise ValueError(f"sides have to be key and value but are {self.key.side} and {self.value.side}")
        if self.sliding == "compressed":
            raise ValueError(
                '`sliding` has to be "auto" or "dense", which leave layers of a window as Transformers has them, but '
                'got "compressed": only `backbone="transform"` compresses windows'
            )
        check_choice("sliding", self.sliding, SLIDING)
        group_size = self.q_group_size
        check_integer("q_group_size", group_size, 1, is_optional=True)
        check_number("low_rank_recent_ratio", self.low_rank_recent_ratio, above=0.0, most=1.0)
        if "kvarn" in (self.key.backbone, self.value.backbone):
            if self.key.backbone != self.value.backbone:
                raise ValueError("`key_backbone` and `value_backbone` have both to be `kvarn`, or none of them")
            if any(side.rank or side.decode_rank or side.sparsity for side in (self.key, self.value)):
                raise ValueError("`rank` and `sparsity` have to be 0 with the `kvarn` backbone, which has neither")
        if self.has_tiles and group_size is not None and self.residual_length % group_size != 0:
            raise ValueError(
                f"`q_group_size` has to divide `residual_length` ({self.residual_length}) when keys use the "
                f"`{self.key.backbone}` backbone, but got {group_size}; accepted: the divisors of "
                f"{self.residual_length}"
            )
        for side in (self.key, self.value):
            limits = (("rank", side.rank, self.token_group), ("decode_rank", side.decode_rank, self.residual_length))
            for name, value, limit in limits:
                if value > limit:
                    raise ValueError(
                        f"`{side.side}_{name}`/`{name}` has to be at most {limit}, the fewest tokens compressed "
                        f"at once, but got {value}"
                    )

    @classmethod
    def from_options(cls, **options: Any) -> "GEARConfig":
        """Builds the config from options of `GEARCache`, `None` where not given; sides have those of both."""
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("quantizer", "recent_length", "recent_nbits"):
            if name in given:
                raise ValueError(f'`{name}` is an option of `backbone="transform"`, and has no meaning with others')

        def side(name: str) -> SideConfig:
            own = {
                option: given.get(f"{name}_{option}", given.get(option, default))
                for option, default in _OF_SIDES.items()
            }
            if own["backbone"] is None:
                check_choice(f"{name}_nbits/nbits", own["nbits"], SUPPORTED_NBITS)
                own["backbone"] = "kcvt" if own["nbits"] >= 4 else "kivi"
            if own["decode_rank"] is None:
                check_integer(f"{name}_rank/rank", own["rank"], 0)
                own["decode_rank"] = min(_DEFAULT_DECODE_RANK, own["rank"])
            return SideConfig(side=name, **own)

        shared = {each.name: given[each.name] for each in fields(cls)[2:] if each.name in given}
        return cls(key=side("key"), value=side("value"), **shared)

    def to_options(self) -> dict[str, Any]:
        """The options of `GEARCache` that stand for this."""
        sides = [(f"{side.side}_{name}", getattr(side, name)) for side in (self.key, self.value) for name in _OF_SIDES]
        shared = [(each.name, getattr(self, each.name)) for each in fields(self)[2:]]
        return dict([*sides, *shared])

    @property
    def token_group(self) -> int:
        """Tokens that share a scale in `kivi` keys, or a tile of `kvarn`."""
        return self.q_group_size or largest_divisor(self.residual_length, _DEFAULT_GROUP_SIZE)

    @property
    def shortest_prompt(self) -> int:
        """Tokens of the shortest prompt of which anything is compressed."""
        return self.token_group

    def packing(self) -> GroupPacking:
        """Makes the packing of a layer."""
        return GroupPacking(
            self.codec,
            residual_length=self.residual_length,
            num_sink_tokens=self.num_sink_tokens,
            least_tokens=self.token_group,
            has_whole_groups=self.has_tiles,
        )

    @property
    def has_tiles(self) -> bool:
        """Whether keys are quantized in groups of tokens."""
        return self.key.backbone in ("kivi", "kvarn")

    def codec(self, key_head_dim: int, value_head_dim: int) -> GroupCodec:
        """Returns the codec of heads of such dimensions; a `ValueError` if an option does not fit them."""
        keys, values = self._side_codec(self.key, key_head_dim), self._side_codec(self.value, value_head_dim)
        return GroupCodec(keys=keys, values=values)

    def _side_codec(self, side: SideConfig, head_dim: int) -> SideCodec:
        for name, value in (("rank", side.rank), ("decode_rank", side.decode_rank)):
            if value > head_dim:
                raise ValueError(
                    f"`{side.side}_{name}`/`{name}` has to be at most the head dimension, {head_dim}, but got {value}"
                )
        is_key, is_kvarn = side.side == "key", side.backbone == "kvarn"
        # Channels that share a scale where groups lie along channels; a whole token's do in `kvarn` and `kcvt`
        group_size = self.q_group_size or largest_divisor(head_dim, _DEFAULT_GROUP_SIZE)
        if is_key and side.backbone != "per-token":
            grouping = Grouping("channel", self.token_group if self.has_tiles else None)
        elif side.backbone in ("kvarn", "kcvt"):
            grouping = Grouping("token", head_dim if is_kvarn else None)
        elif head_dim % group_size:
            accepted = [divisor for divisor in range(1, head_dim + 1) if head_dim % divisor == 0]
            raise ValueError(
                f"`q_group_size` has to divide the head dimension, {head_dim}, for the chosen "
                f"`{side.side}_backbone`, but got {group_size}; accepted: {accepted} or None"
            )
        else:
            grouping = Grouping("token", group_size)
        return SideCodec(
            side=side.side,
            head_dim=head_dim,
            nbits=side.nbits,
            grouping=grouping,
            sparsity=side.sparsity,
            rank=side.rank,
            decode_rank=side.decode_rank,
            num_iterations=self.num_iterations,
            recent_ratio=self.low_rank_recent_ratio,
            is_rotated=is_kvarn or (self.rotate_values and not is_key),
            # Keys turn with their positions, so they share no errors
            spreads_errors=not is_key and not is_kvarn,
            tile_length=self.token_group if is_kvarn else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetChoice:
    """
    Says why a cache is what it is, where it was chosen by measuring: see `kvcache_plugins.choose_cache`.

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
