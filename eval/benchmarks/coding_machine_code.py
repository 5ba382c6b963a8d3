"""Machine code of the kernels that code rows; see `machine_code`, of whose result it makes some rows."""

from typing import Any

import torch

from kvcache_plugins.codecs.parts import CodedPart
from kvcache_plugins.codecs.rows import RowCodec, RowTable
from kvcache_plugins.eval.machine_code.bounds import counted_row
from kvcache_plugins.eval.machine_code.compilation import compile_for, disassemble
from kvcache_plugins.eval.machine_code.listing import Listing


SIDES = ("keys", "values")
# Of a number before it is coded
_DENSE_BITS = 16


def is_coded(part: CodedPart) -> bool:
    """Whether a kernel makes its rows."""
    return _tables(part)[0].quantizer != "trellis"


def count_coding(cache: str, part: CodedPart, head_dim: int, side: str, capability: int) -> dict[str, Any]:
    """One row, as of attention: what it takes to code a number of `side`, one of `SIDES`."""
    # Imported late, as Triton need not be there
    from kvcache_plugins.kernels.triton import prepare_encoding

    table = _tables(part)[SIDES.index(side)]
    num_heads = part.keys.shape[1]
    states = torch.empty(1, num_heads, part.length, head_dim, dtype=torch.bfloat16)
    launch = prepare_encoding(states, table, part.positions, has_products_of_bfloat16=True)
    compiled = compile_for(launch.kernel, launch.arguments, capability, **launch.options)
    # Loops with products are over channels
    kinds = Listing(disassemble(compiled)).count_all(-(-head_dim // launch.arguments["BLOCK_C"]))
    numbers = launch.arguments["BLOCK_T"] * head_dim / launch.options["num_warps"]
    names = {"cache": cache, "kernel": f"{side} coded", "head_dim": head_dim, "query_heads": None}
    # Numbers are read, and rows written
    bits = 8 * table.row_size / head_dim
    return counted_row(names, compiled, kinds, numbers, bits, num_dense_bits=_DENSE_BITS)


def _tables(part: CodedPart) -> tuple[RowTable, RowTable]:
    assert isinstance(part.codec, RowCodec)
    return part.codec.tables()
