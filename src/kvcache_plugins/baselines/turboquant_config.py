"""Options of TurboQuant, validated once and immutable afterwards."""

from dataclasses import dataclass

from kvcache_plugins.codecs.codec import TokenCodec
from kvcache_plugins.codecs.turboquant import TurboQuantCoder
from kvcache_plugins.option_checks import check_bool, check_choice


_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
# One bit is the residual's, and codes have at least one
_WIDTHS_WITH_RESIDUAL = (2, 3, 4, 5, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurboQuantConfig:
    """See `TurboQuantCache` for the meaning of each field."""

    key_nbits: int
    value_nbits: int
    residual: bool

    def __post_init__(self) -> None:
        check_bool("residual", self.residual)
        check_choice("key_nbits/nbits", self.key_nbits, _WIDTHS_WITH_RESIDUAL if self.residual else _WIDTHS)
        check_choice("value_nbits/nbits", self.value_nbits, _WIDTHS)

    def codec(self, key_dim: int, value_dim: int) -> TokenCodec:
        """Makes the codec of a layer."""
        return TokenCodec(
            TurboQuantCoder(key_dim, self.key_nbits, self.residual), TurboQuantCoder(value_dim, self.value_nbits)
        )
