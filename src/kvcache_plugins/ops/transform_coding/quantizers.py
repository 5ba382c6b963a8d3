"""How the numbers of a row become codes: `"lloyd-max"`, one by one, or `"trellis"`, each with those before it.

Legend: B batch, H heads, T tokens, N blocks of eight channels, R bytes of a row.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from . import codebooks, packing, trellis


class Quantizer(Protocol):
    """A quantizer of normal variables at the widths of blocks `[B, H, N]`."""

    @property
    def distortions(self) -> tuple[float, ...]:
        """Mean squared errors at all widths from 0 on."""

    def quantize(self, normal: torch.Tensor, widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
        """Codes `[B, H, T, N, 8]`, int64, of numbers; `is_weighted` says that errors count by `4^width`."""

    def points(self, codes: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        """What codes `[B, H, T, N, 8]` stand for."""

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, widths: torch.Tensor, row_size: int) -> torch.Tensor:
        """Rows `[B, H, T, R]`, uint8, of codes and bytes `[B, H, T, 1]`."""

    def unpack(self, rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        """The codes of rows."""


@dataclass(frozen=True, slots=True)
class LloydMax:
    """Every number goes to its nearest point; see `codebooks`."""

    distortions: tuple[float, ...] = codebooks.DISTORTIONS

    def quantize(self, normal: torch.Tensor, widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
        bounds = codebooks.thresholds(normal.device)[widths.long()]
        by_block = normal.transpose(2, 3).flatten(3).contiguous()
        codes = torch.searchsorted(bounds, by_block)
        return codes.unflatten(3, (-1, normal.shape[4])).transpose(2, 3)

    def points(self, codes: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        widths = widths.long()
        first, second, third = codebooks.coefficients(codes.device)[widths][:, :, None, :, None].unbind(-1)
        centred = (2 * codes + 1).float() * 0.5 ** widths.float()[:, :, None, :, None] - 1
        square = centred * centred
        return centred * (first + square * (second + square * third))

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, widths: torch.Tensor, row_size: int) -> torch.Tensor:
        return packing.pack_rows(codes, scales, widths, row_size)

    def unpack(self, rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        return packing.unpack_rows(rows, widths)


@dataclass(frozen=True, slots=True)
class Trellis:
    """The numbers of a row go to the nearest path of points; see `trellis`. Its codes are states."""

    distortions: tuple[float, ...] = trellis.DISTORTIONS

    def quantize(self, normal: torch.Tensor, widths: torch.Tensor, is_weighted: bool) -> torch.Tensor:
        return trellis.find_states(normal, widths, is_weighted)

    def points(self, codes: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        return trellis.points_of(codes, widths)

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, widths: torch.Tensor, row_size: int) -> torch.Tensor:
        return trellis.pack_states(codes, scales, widths, row_size)

    def unpack(self, rows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        return trellis.unpack_states(rows, widths)


QUANTIZERS: dict[str, Quantizer] = {"lloyd-max": LloydMax(), "trellis": Trellis()}


def unshrunk(name: str) -> torch.Tensor:
    """
    What the points of every width are multiplied by, so that they are as large as what they stand for: a quantizer's
    points are means, which lie further in.
    """
    return torch.tensor([0.0] + [1 / (1 - distortion) for distortion in QUANTIZERS[name].distortions[1:]])
