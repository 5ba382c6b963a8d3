"""Tables that kernels over rows read beside those of a cache, on the device that asks for them first.

Legend: D head dim.
"""

from functools import cache

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.rotation import hadamard_matrix, rotation_size
from kvcache_plugins.triton_kernels.transform_coding.attend import block_channels
from kvcache_plugins.triton_kernels.transform_coding.coded_rows import Codebook, RotaryAngles
from kvcache_plugins.triton_kernels.transform_coding.coding_tiles import GRID_END, GRID_STEPS, NUM_CELLS

from . import codebooks, trellis
from .quantizers import unshrunk
from .rotary import RotaryLayout


# Positions whose angles are held one by one; of others the multiples, at least so many of them
_NUM_NEAR = 256
_LEAST_FAR = 64


@cache
def coefficients_of(quantizer: str, is_weighted: bool, device: torch.device) -> torch.Tensor:
    """Those of `CodedRows`, whose points are larger where scales shrink nothing."""
    is_trellis = quantizer == "trellis"
    with torch.inference_mode(False):
        points = torch.tensor(trellis.COEFFICIENTS if is_trellis else codebooks.COEFFICIENTS, dtype=torch.float64)
        if not is_weighted:
            points = points * unshrunk(quantizer)[:, None]
        widths = torch.full((len(points),), trellis.STATE_BITS) if is_trellis else torch.arange(len(points))
        factor = 0.5 ** widths.double()
        multipliers = torch.tensor(trellis.MULTIPLIERS) if is_trellis else torch.ones(len(points))
        columns = [factor, -1023 * factor - 1, *points.unbind(dim=1), multipliers.double()]
        return torch.stack(columns, dim=1).float().to(device)


def rotary_angles(layout: RotaryLayout, num_positions: int, device: torch.device) -> RotaryAngles | None:
    """Those of a layout up to a number of positions, or `None` where it rotates nothing."""
    if not layout.frequencies:
        return None
    num_far = max(_LEAST_FAR, 1 << (-(-num_positions // _NUM_NEAR)).bit_length())
    return _angles_of(layout, num_far, device)


@cache
def _angles_of(layout: RotaryLayout, num_far: int, device: torch.device) -> RotaryAngles:
    with torch.inference_mode(False):
        near, far = (
            torch.stack(layout.angles(torch.arange(count) * step), dim=1).to(device)
            for count, step in ((_NUM_NEAR, 1), (num_far, _NUM_NEAR))
        )
        return RotaryAngles(layout.partners(device).int(), near, far)


@cache
def codebook_of(is_weighted: bool, device: torch.device) -> Codebook:
    """What numbers become that are coded one by one."""
    with torch.inference_mode(False):
        bounds = codebooks.thresholds(torch.device("cpu"))
        # As the kernel computes it, so that a number is above all bounds of the cells before its own
        cells = _cells(bounds)
        codes = torch.searchsorted(
            cells, torch.arange(NUM_CELLS.value, dtype=torch.int32).expand(len(cells), -1).contiguous()
        )
        own = torch.full(codes.shape, torch.inf).scatter_(1, cells.long(), bounds)
        return Codebook(
            coefficients_of("lloyd-max", is_weighted, device), codes.to(torch.uint8).to(device), own.to(device)
        )


def _cells(numbers: torch.Tensor) -> torch.Tensor:
    """The cells of the kernel's grid that numbers lie in, int32."""
    return ((numbers.clamp(-GRID_END.value, GRID_END.value) + GRID_END.value) * GRID_STEPS.value).int()


@cache
def signs_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The Hadamard matrix that values are rotated by, of ones, as `CodingTable` has it."""
    size = rotation_size(head_dim)
    with torch.inference_mode(False):
        signs = hadamard_matrix(size, torch.device("cpu")).sign()
        signs = torch.block_diag(*[signs] * (head_dim // size))
        return in_tile_order(signs).to(dtype).to(device)


def in_tile_order(matrix: torch.Tensor) -> torch.Tensor:
    """Columns `[..., D]` at their places of a tile, as `coding_tiles.row_places` says, zeros where there are none."""
    padded = F.pad(matrix, (0, block_channels(matrix.shape[-1]) - matrix.shape[-1]))
    return padded.unflatten(-1, (-1, 8)).transpose(-1, -2).flatten(-2).contiguous()
