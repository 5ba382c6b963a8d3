"""Options of GEAR and of transform coding, validated once and immutable afterwards."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.codecs.groups import GroupCodec, SideCodec
from kvcache_plugins.codecs.prompt_codec import PromptCodec
from kvcache_plugins.codecs.quantization import SUPPORTED_NBITS, Grouping
from kvcache_plugins.codecs.quantizers import QUANTIZERS, num_blocks
from kvcache_plugins.codecs.rope import candidate_layouts
from kvcache_plugins.layers.packing import DROP_STEP, GroupPacking, RowPacking
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
# The backbone that codes every token by itself
BACKBONE = "transform"
# Tokens that a table is made of, at least; before that all are exact
MIN_TOKENS = 64
# With its scale a row is a word at least, which is what compiled code loads
LEAST_BYTES = 3
# Of keys and of values, a channel: of the presets the one of fewest bits whose KL is below that of `gear-k4v4`, the
# default before, in every table
_NBITS = (4.0, 3.25)
_MEAN_NBITS = (sum(_NBITS) / 2,) * 2
# In shorter windows more is lost than the bytes are worth: docs/results/gear.md
_LEAST_WINDOW = 2048
# A window that is compressed by itself holds so many chunks and buffers
_WINDOW_FACTOR = 4
# Before a table is made of a sequence that grows token by token, tokens whose queries are heard
_NUM_HEARD = 32
# Options that say the same whatever the bits are, and do not tell that another form is meant
OWN_OPTIONS = "residual_length", "num_sink_tokens", "quantizer", "sliding", "recent_length", "recent_nbits"
# A prompt's own scales reach it, though deviations end with float16
_LARGEST = 2.0**22


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

    def check_ranks(self, most: int, most_decoded: int, what: str) -> None:
        """Raises a `ValueError` if the rank of prompts or of decoded tokens is larger than `what` allows."""
        for name, value, limit in (("rank", self.rank, most), ("decode_rank", self.decode_rank, most_decoded)):
            if value > limit:
                raise ValueError(f"`{self.side}_{name}`/`{name}` has to be at most {limit}, {what}, but got {value}")


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
            side.check_ranks(self.token_group, self.residual_length, "the fewest tokens compressed at once")

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
        side.check_ranks(head_dim, head_dim, "the head dimension")
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
class TransformConfig:
    """
    All options of a `GEARCache` with `backbone="transform"`.

    Attributes:
        key_nbits, value_nbits (`float`): bits a channel on average; rounded to a bit for eight channels.
        residual_length, num_sink_tokens (`int`): decoded tokens that wait in exact form, and first ones that stay so.
        sliding (`str`): `"auto"`, `"compressed"` or `"dense"`: what is done with layers whose attention has a window.
        recent_length, recent_nbits (`int`): newest of the packed decoded tokens whose rows have more bits, at most,
            and how many bits a channel they have more.
    """

    key_nbits: float
    value_nbits: float
    residual_length: int = 5
    num_sink_tokens: int = 4
    quantizer: str = "lloyd-max"
    sliding: str = "auto"
    recent_length: int = 128
    recent_nbits: int = 2

    def __post_init__(self) -> None:
        check_choice("quantizer", self.quantizer, list(QUANTIZERS))
        for name in ("key_nbits", "value_nbits"):
            check_number(f"{name}/nbits", getattr(self, name), above=0, most=self.max_width)
        for name, least in (("residual_length", 1), ("num_sink_tokens", 0), ("recent_length", 0), ("recent_nbits", 0)):
            check_integer(name, getattr(self, name), least)
        check_choice("sliding", self.sliding, SLIDING)

    def to_options(self) -> dict[str, Any]:
        """The options of `GEARCache` that stand for this."""
        return {"backbone": BACKBONE, **asdict(self)}

    def to_calibrated_options(self) -> dict[str, Any]:
        """Lists the options of a cache with a calibration, which shares the bits of both sides."""
        options = self.to_options()
        del options["value_nbits"]
        return {"nbits": options.pop("key_nbits"), **options}

    @property
    def shortest_prompt(self) -> int:
        """Tokens of the shortest prompt that is coded."""
        return self.num_sink_tokens + MIN_TOKENS

    @property
    def least_window(self) -> int:
        """Tokens of the smallest window of which layers are coded if `sliding` is `"auto"`."""
        return max(_LEAST_WINDOW, _WINDOW_FACTOR * (max(self.residual_length, DROP_STEP) + self.residual_length))

    def code_bytes(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Bytes that the codes of a key and of a value take: the sums of their blocks' widths."""
        blocks = (num_blocks(key_dim), self.key_nbits), (num_blocks(value_dim), self.value_nbits)
        keys, values = (min(max(round(nbits * count), LEAST_BYTES), self.max_width * count) for count, nbits in blocks)
        return keys, values

    def packing(self, frequencies: tuple[float, ...] | None = None, fixed: Codec | None = None) -> RowPacking:
        """
        Makes the packing of a layer whose keys have a rotary embedding of such frequencies, radians a token of every
        pair of channels; `fixed` codes tokens if that does not depend on the prompt, as by a calibration.
        """
        return RowPacking(
            fixed if fixed is not None else PromptCodecs(self, frequencies),
            residual_length=self.residual_length,
            num_sink_tokens=self.num_sink_tokens,
            least_tokens=self.shortest_prompt if fixed is None else self.num_sink_tokens + 1,
            num_heard=_NUM_HEARD,
            largest=_LARGEST,
            recent_length=self.recent_length,
            recent_nbits=self.recent_nbits,
        )

    @property
    def max_width(self) -> int:
        """The most bits that a channel may have."""
        return len(QUANTIZERS[self.quantizer].distortions) - 1


@dataclass(frozen=True, slots=True)
class PromptCodecs:
    """Makes codecs of prompts under some options, for keys of a rotary embedding."""

    config: TransformConfig
    frequencies: tuple[float, ...] | None

    def __call__(self, key_dim: int, value_dim: int) -> PromptCodec:
        layouts = candidate_layouts(self.frequencies, key_dim)
        sizes = self.config.code_bytes(key_dim, value_dim)
        return PromptCodec((key_dim, value_dim), sizes, layouts, self.config.quantizer)


def transform_config(options: dict[str, Any], *, is_calibrated: bool = False) -> TransformConfig:
    """
    Makes the config of flat options of `GEARCache`, `None` where not given, of which calibrated ones share bits
    between keys and values; a `ValueError` if an option is given that this backbone does not have.
    """
    options = dict(options)
    taken = {name: options.pop(name) for name in OWN_OPTIONS}
    nbits, key_nbits, value_nbits = (options.pop(name) for name in ("nbits", "key_nbits", "value_nbits"))
    foreign = sorted(name for name, value in options.items() if value is not None)
    if foreign:
        raise ValueError(
            f"`{foreign[0]}` has no meaning with the `transform` backbone; its options are `nbits`, `key_nbits`, "
            "`value_nbits`, " + ", ".join(f"`{name}`" for name in OWN_OPTIONS)
        )
    defaults = (nbits, nbits) if nbits is not None else _MEAN_NBITS if is_calibrated else _NBITS
    return TransformConfig(
        key_nbits=defaults[0] if key_nbits is None else key_nbits,
        value_nbits=defaults[1] if value_nbits is None else value_nbits,
        **{name: value for name, value in taken.items() if value is not None},
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
