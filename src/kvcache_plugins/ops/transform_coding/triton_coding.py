"""The door to the Triton kernels that code rows: keys and values of tokens in, rows out. One launch a side.

Not coded here but in plain PyTorch are a trellis, whose codes are found one after the other, heads of more than 256
channels, and float64.
"""

import torch

from kvcache_plugins.triton_kernels.transform_coding.code_basis import prepare_basis_coding
from kvcache_plugins.triton_kernels.transform_coding.code_rows import prepare_coding
from kvcache_plugins.triton_kernels.transform_coding.coded_rows import (
    BasisCodingTable,
    CodingLaunch,
    CodingTable,
)

from .basis_table import BasisTable
from .rotary import RotaryLayout
from .rows import RowTable
from .triton_tables import codebook_of, rotary_angles, signs_of


def encode_keys(
    keys: torch.Tensor, table: RowTable | BasisTable, layout: RotaryLayout, start: int, padding: torch.Tensor | None
) -> torch.Tensor:
    """Rows `[B, H, T, R]` of keys `[B, H, T, D]` from index `start` on, with their rotary embedding."""
    return _rows(prepare_keys(keys, table, layout, start, padding))


def encode_values(values: torch.Tensor, table: RowTable | BasisTable) -> torch.Tensor:
    """Rows `[B, H, T, R]` of values `[B, H, T, D]`, which are not rotated yet."""
    return _rows(prepare_values(values, table, has_products_of_bfloat16=values.is_cuda))


def prepare_keys(
    keys: torch.Tensor, table: RowTable | BasisTable, layout: RotaryLayout, start: int, padding: torch.Tensor | None
) -> CodingLaunch:
    """The launch of `encode_keys`, which is not made."""
    angles = rotary_angles(layout, start + keys.shape[2], keys.device)
    if padding is not None:
        padding = padding.to(keys.device)
    if isinstance(table, BasisTable):
        coding = _basis_table(table)
        return prepare_basis_coding(keys.detach(), coding, angles, start=start, padding=padding)
    return prepare_coding(keys.detach(), _table(table, None), angles, start=start, padding=padding)


def prepare_values(
    values: torch.Tensor, table: RowTable | BasisTable, *, has_products_of_bfloat16: bool
) -> CodingLaunch:
    """The launch of `encode_values`; products of bfloat16 are what GPUs have and Triton's interpreter has not."""
    if isinstance(table, BasisTable):
        return prepare_basis_coding(values.detach(), _basis_table(table))
    is_own = values.dtype == torch.float16 or values.dtype == torch.bfloat16 and has_products_of_bfloat16
    signs = signs_of(table.head_dim, values.dtype if is_own else torch.float16, values.device)
    return prepare_coding(values.detach(), _table(table, signs))


def _rows(launch: CodingLaunch) -> torch.Tensor:
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(launch.rows):
        launch()
    return launch.rows


def _table(table: RowTable, signs: torch.Tensor | None) -> CodingTable:
    order, mean = (None if each is None else each.contiguous() for each in (table.order, table.mean))
    tables = table.widths.contiguous(), order, mean, table.deviation.contiguous(), signs
    codebook = codebook_of(table.is_weighted, table.widths.device)
    return CodingTable(*tables, codebook, table.row_size, table.head_dim, table.is_weighted)


def _basis_table(table: BasisTable) -> BasisCodingTable:
    tables = table.widths, table.basis, table.steps, table.factors, table.mean, table.inverse
    codebook = codebook_of(table.is_weighted, table.widths.device)
    sizes = table.row_size, table.num_components, table.head_dim
    return BasisCodingTable(*tables, codebook, *sizes, table.is_weighted, table.num_refits)
