"""The door to the Triton kernels that code rows: keys and values of tokens in, rows out. One launch a side.

Not coded here but in plain PyTorch are a trellis, whose codes are found one after the other, heads of more than 256
channels, and float64.
"""

import torch

from kvcache_plugins.triton_kernels.transform_coding.code_rows import code_rows
from kvcache_plugins.triton_kernels.transform_coding.coded_rows import CodingTable

from .rotary import RotaryLayout
from .rows import RowTable
from .triton_tables import codebook_of, rotary_angles, signs_of


def encode_keys(
    keys: torch.Tensor, table: RowTable, layout: RotaryLayout, start: int, padding: torch.Tensor | None
) -> torch.Tensor:
    """Rows `[B, H, T, R]` of keys `[B, H, T, D]` from index `start` on, with their rotary embedding."""
    angles = rotary_angles(layout, start + keys.shape[2], keys.device)
    if padding is not None:
        padding = padding.to(keys.device)
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(keys):
        return code_rows(keys, _coding_table(table, None), angles, start=start, padding=padding)


def encode_values(values: torch.Tensor, table: RowTable) -> torch.Tensor:
    """Rows `[B, H, T, R]` of values `[B, H, T, D]`, which are rotated before."""
    # Triton's interpreter has no products of bfloat16
    is_own = values.dtype == torch.float16 or values.dtype == torch.bfloat16 and values.is_cuda
    dtype = values.dtype if is_own else torch.float16
    signs = signs_of(table.head_dim, dtype, values.device)
    with torch.cuda.device_of(values):
        return code_rows(values, _coding_table(table, signs))


def _coding_table(table: RowTable, signs: torch.Tensor | None) -> CodingTable:
    order, mean = (None if each is None else each.contiguous() for each in (table.order, table.mean))
    tables = table.widths.contiguous(), order, mean, table.deviation.contiguous(), signs
    codebook = codebook_of(table.is_weighted, table.widths.device)
    return CodingTable(*tables, codebook, table.row_size, table.head_dim, table.is_weighted)
