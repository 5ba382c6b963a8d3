"""The door to the Triton attention over rows: parts of a cache in, tensors out.

One launch a coded part, and one at the end that merges them and attends to the exact parts.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.ops.kept_step import PartStep, attend_parts
from kvcache_plugins.ops.masking import slice_mask
from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.triton_kernels.transform_coding.attend import has_pairs, prepare_rows
from kvcache_plugins.triton_kernels.transform_coding.basis_attend import prepare_basis
from kvcache_plugins.triton_kernels.transform_coding.coded_rows import BasisRows, CodedRows

from .basis_coder import BasisCoder
from .basis_table import BasisTable
from .parts import CodedPart
from .rows import RowTable
from .triton_tables import coefficients_of, rotary_angles


# Exact parts that `combine` takes
_MAX_EXACT = 2


def attend(query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_heads: int, scale: float) -> torch.Tensor:
    """
    Attention of a few queries over all parts, of which at least one is coded; see `attention.attend`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        parts (`Sequence[DensePart | CodedPart]`): what is attended to.
        num_heads (`int`): H.
        scale (`float`): factor of the scores.
    """
    batch_size, num_query_heads, num_queries, head_dim = query.shape
    rows = query.reshape(batch_size, num_heads, -1, head_dim)
    dense = [part for part in parts if isinstance(part, DensePart)]
    # What stands behind the rows may be in two pieces, which follow each other and have columns of one mask
    while len(dense) > _MAX_EXACT:
        last = dense[-2:]
        masks = [slice_mask(part.mask, 0, part.length) for part in last]
        mask = torch.cat([each for each in masks if each is not None], dim=3) if last[0].mask is not None else None
        keys, values = (torch.cat(pieces, dim=2) for pieces in zip(*(part.in_use() for part in last), strict=True))
        dense[-2:] = [DensePart(keys, values, keys.shape[2], mask)]
    coded = [part for part in parts if isinstance(part, CodedPart)]
    # Launches go to the current device, which need not be the one that this layer is on
    with torch.cuda.device_of(query):
        output = attend_parts(rows, dense, coded, scale, prepare_part)
    return output.reshape(batch_size, num_query_heads, num_queries, -1)


def prepare_part(rows: torch.Tensor, part: CodedPart, scale: float, packed: bool | None = None) -> PartStep:
    """
    What attention of rows `[B, H, rows, D]` over a coded part does, without doing it; `packed`: see `prepare_rows`, by
    default where rows are on a GPU of NVIDIA's.
    """
    layout = part.coder.layout
    where: dict[str, Any] = {
        "start": part.start,
        "length": part.length,
        "num_tokens": part.num_tokens,
        "padding": None if part.padding is None else part.padding.to(rows.device),
        "mask": slice_mask(part.mask, 0, part.length),
        "scale": scale,
        "packed": has_pairs(rows.device.type) if packed is None else packed,
    }
    angles = rotary_angles(layout, part.start + part.length, rows.device)
    if isinstance(part.coder, BasisCoder):
        key_table, value_table = part.coder.tables.on(rows.device)
        keys, values = _basis_rows(part.keys, key_table), _basis_rows(part.values, value_table)
        return PartStep(prepare_basis(rows, keys, values, angles, **where), value_table.combine)
    keys_of_rows, values_of_rows = (
        _coded_rows(side, table) for side, table in ((part.keys, part.coder.keys), (part.values, part.coder.values))
    )
    mean = part.coder.value_mean

    def add_mean(output: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        assert mean is not None
        return output + total[..., None] * mean.float()[:, :, None, None]

    finish = None if mean is None else add_mean
    return PartStep(prepare_rows(rows, keys_of_rows, values_of_rows, angles, **where), finish)


def _coded_rows(rows: torch.Tensor, table: RowTable) -> CodedRows:
    coefficients = coefficients_of(table.quantizer, table.is_weighted, rows.device)
    is_trellis = table.quantizer == "trellis"
    tables = table.widths, table.order, table.mean, table.deviation
    return CodedRows(rows, *tables, coefficients, table.head_dim, is_trellis)


def _basis_rows(rows: torch.Tensor, table: BasisTable) -> BasisRows:
    coefficients = coefficients_of(table.quantizer, table.is_weighted, rows.device)
    tables = table.widths, table.basis, table.steps, table.factors, table.mean
    sizes = table.num_components, table.head_dim
    return BasisRows(rows, *tables, coefficients, *sizes, table.quantizer == "trellis")
