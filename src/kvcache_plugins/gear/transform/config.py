"""Options of transform coding, validated once and immutable afterwards."""

from dataclasses import asdict, dataclass
from typing import Any

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.codecs.prompt_codec import PromptCodec
from kvcache_plugins.codecs.quantizers import QUANTIZERS, num_blocks
from kvcache_plugins.codecs.rope import candidate_layouts
from kvcache_plugins.gear.config import SLIDING
from kvcache_plugins.layers.packing import DROP_STEP, RowPacking
from kvcache_plugins.option_checks import check_choice, check_integer, check_number


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
        return _bytes(self.key_nbits, key_dim, self.max_width), _bytes(self.value_nbits, value_dim, self.max_width)

    def packing(self, frequencies: tuple[float, ...] | None, fixed: Codec | None = None) -> RowPacking:
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


def _bytes(nbits: float, head_dim: int, max_width: int) -> int:
    count = num_blocks(head_dim)
    return min(max(round(nbits * count), LEAST_BYTES), max_width * count)


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
