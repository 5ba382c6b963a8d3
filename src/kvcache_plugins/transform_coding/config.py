"""Options of transform coding, validated and immutable."""

from dataclasses import asdict, dataclass
from typing import Any

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.codecs.prompt_codec import PromptCodec
from kvcache_plugins.formats.quantizer import MAX_WIDTH, NAME, num_blocks
from kvcache_plugins.formats.rotary import NOT_ROTATED, RotaryEmbedding
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.row_layer import DROP_STEP
from kvcache_plugins.option_checks import check_choice, check_integer, check_number


# Treatments of layers with a window of attention
SLIDING = ("auto", "compressed", "dense")
# Fewest tokens that a codec is fitted to; with fewer all are exact
MIN_TOKENS = 64
# With its scale a row has a word at least, which is the unit of C's loads
LEAST_BYTES = 3
# Default bits of keys and of values: the smallest preset whose KL was below that of `gear-k4v4` in every table
DEFAULT_NBITS = (4.0, 3.25)
# A calibration divides bits between keys and values
DEFAULT_MEAN_NBITS = sum(DEFAULT_NBITS) / 2
# In shorter windows the loss outweighs the bytes: docs/results/gear.md
_LEAST_WINDOW = 2048
# Number of chunks and buffers in the smallest window that `"auto"` compresses
_WINDOW_FACTOR = 4
# Number of tokens before the first fit whose queries are recorded, for a sequence that grows token by token
_NUM_RECORDED_QUERIES = 32
# Largest magnitude: scales reach it although standard deviations are float16
_LARGEST = 2.0**22


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformCodingConfig:
    """
    Options of a `TransformCodingCache`, where each field is explained. Codes of a head are rounded to whole bytes.
    """

    key_nbits: float
    value_nbits: float
    residual_length: int = 5
    num_sink_tokens: int = 4
    # Not an option of the cache: files of earlier versions may name another quantizer
    quantizer: str = NAME
    sliding: str = "auto"
    recent_length: int = 128
    recent_nbits: int = 2

    def __post_init__(self) -> None:
        for name in ("key_nbits", "value_nbits"):
            check_number(f"{name}/nbits", getattr(self, name), above=0, most=MAX_WIDTH)
        for name, least in (("residual_length", 1), ("num_sink_tokens", 0), ("recent_length", 0), ("recent_nbits", 0)):
            check_integer(name, getattr(self, name), least)
        check_choice("sliding", self.sliding, SLIDING)

    def to_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `TransformCodingCache` that make the same cache without a calibration."""
        options = asdict(self)
        del options["quantizer"]
        return options

    def to_calibrated_options(self) -> dict[str, Any]:
        """Return the keyword arguments that make the same cache with a calibration."""
        options = self.to_options()
        del options["value_nbits"]
        return {"nbits": options.pop("key_nbits"), **options}

    @property
    def shortest_prompt(self) -> int:
        """Number of tokens of the shortest prompt that is coded."""
        return self.num_sink_tokens + MIN_TOKENS

    @property
    def token_group(self) -> int:
        """Number of tokens that are coded together: every token is a row of its own."""
        return 1

    @property
    def least_window(self) -> int:
        """Number of tokens of the smallest window that is coded if `sliding` is `"auto"`."""
        return max(_LEAST_WINDOW, _WINDOW_FACTOR * (max(self.residual_length, DROP_STEP) + self.residual_length))

    def code_bytes(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the bytes of a key's and of a value's codes: the sums of their blocks' widths."""
        blocks = (num_blocks(key_dim), self.key_nbits), (num_blocks(value_dim), self.value_nbits)
        keys, values = (min(max(round(nbits * count), LEAST_BYTES), MAX_WIDTH * count) for count, nbits in blocks)
        return keys, values

    def policy(self, rotary: RotaryEmbedding = NOT_ROTATED, fixed: Codec | None = None) -> RowPolicy:
        """
        Make the policy of a layer.

        Args:
            rotary (`RotaryEmbedding`, *optional*): rotary embedding of keys.
            fixed (`Codec`, *optional*): codec of a calibration, which is not fitted to the prompt.
        """
        return RowPolicy(
            PromptCodecs(self, rotary),
            shared_codec=fixed,
            residual_length=self.residual_length,
            num_sink_tokens=self.num_sink_tokens,
            least_tokens=self.shortest_prompt if fixed is None else self.num_sink_tokens + 1,
            num_recorded_queries=_NUM_RECORDED_QUERIES,
            largest=_LARGEST,
            recent_length=self.recent_length,
            recent_nbits=self.recent_nbits,
        )


@dataclass(frozen=True, slots=True)
class PromptCodecs:
    """Factory of codecs that are fitted to a prompt, for keys with a rotary embedding."""

    config: TransformCodingConfig
    rotary: RotaryEmbedding

    def __call__(self, key_dim: int, value_dim: int) -> PromptCodec:
        sizes = self.config.code_bytes(key_dim, value_dim)
        layouts = self.rotary.layouts(key_dim)
        return PromptCodec((key_dim, value_dim), sizes, layouts, compares_all=self.rotary.has_sections)
