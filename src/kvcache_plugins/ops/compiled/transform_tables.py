"""What compiled code reads of transform coding beside rows and their tables: made once, kept by whoever asks."""

from functools import cache

import torch

from kvcache_plugins.ops.transform_coding import codebooks, trellis
from kvcache_plugins.ops.transform_coding.quantizers import unshrunk
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout
from kvcache_plugins.ops.transform_coding.rows import scale_of

from .transform_attention import TILE


# From 0 to the most bits that any quantizer has
_NUM_WIDTHS = codebooks.MAX_WIDTH + 1


@cache
def codebook_of(quantizer: str) -> tuple[torch.Tensor, ...]:
    """Coefficients of the points of keys and of values, the scales of all bytes, and multipliers of states."""
    coefficients, multipliers = torch.zeros(_NUM_WIDTHS, 3), torch.zeros(_NUM_WIDTHS, dtype=torch.int64)
    is_trellis = quantizer == "trellis"
    own = torch.tensor(trellis.COEFFICIENTS if is_trellis else codebooks.COEFFICIENTS)
    coefficients[: len(own)] = own
    if is_trellis:
        multipliers[: len(own)] = torch.tensor(trellis.MULTIPLIERS)
    of_values = coefficients.clone()
    of_values[: len(own)] *= unshrunk(quantizer)[:, None]
    return coefficients, of_values, scale_of(torch.arange(256)).contiguous(), multipliers


@cache
def rotary_tables(layout: RotaryLayout) -> tuple[torch.Tensor, ...]:
    """Partners, cosines and signed sines of the offsets in a tile and of its length, and frequencies."""
    device = torch.device("cpu")
    cosines, sines = layout.angles(torch.arange(TILE + 1))
    return layout.partners(device), cosines.contiguous(), sines.contiguous(), layout.channel_frequencies(device)


def padding_of(padding: torch.Tensor | None, batch_size: int) -> torch.Tensor:
    """Tokens at the start of every item that have no position, `[B]`, int64."""
    return _no_padding(batch_size) if padding is None else padding.long().contiguous()


@cache
def _no_padding(batch_size: int) -> torch.Tensor:
    return torch.zeros(batch_size, dtype=torch.int64)
