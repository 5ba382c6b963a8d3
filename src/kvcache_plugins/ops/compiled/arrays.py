"""How tensors reach compiled code: by address.

A decode step calls the compiled attention once a layer with some sixty arrays, and wrapping each for the call takes
longer than the attention itself. So a table of addresses and dimensions is made once for compressed states, compiled
code makes its arrays of that, and what changes from step to step is one small table more. Tensors have to be
contiguous, and whoever calls keeps them alive.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, int64, njit, types  # type: ignore[attr-defined]

from .layout import CodeLayout
from .primitives import INLINED, OPTIONS
from .vectors import untyped_intrinsic


MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0)
# An address and up to five dimensions
ROW = 6
# Rows of the table of one side, in the order of `TENSOR_NAMES`, then the layout's, then numbers
_LAYOUT_ROW = 8
_NUMBERS_ROW = 14
SIDE_ROWS = 15


class Side(NamedTuple):
    """Keys or values as arrays: the tensors of `CompressedStates`, empty where it has none, and four numbers."""

    codes: Any
    scale: Any
    zero: Any
    low_rank_a: Any
    low_rank_b: Any
    outlier_indices: Any
    # The same in 32 bits; only one of the two is what is stored
    wide_indices: Any
    outlier_values: Any
    outlier_offsets: Any
    by_channel: bool
    head_dim: int
    channel_bits: int
    # Channels that are rotated together, 1 if none are
    rotation_size: int


@untyped_intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(int64), generate


@njit(**OPTIONS)
def filled(rows: int, columns: int, number: Any) -> Any:
    """
    A float32 array of one number.

    NumPy's own functions are compiled anew for every way in which a shape is written.
    """
    result = np.empty((rows, columns), dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            result[row, column] = number
    return result


@njit(**OPTIONS)
def zeros(rows: int, columns: int) -> Any:
    """The same of zeros."""
    return filled(rows, columns, _ZERO)


@njit(**OPTIONS)
def floats_at(address: int, shape: Any) -> Any:
    """A float32 array of any dimensions."""
    return carray(_pointer(address), shape, np.float32)


@njit(**OPTIONS)
def doubles_at(address: int, shape: Any) -> Any:
    """The same of float64."""
    return carray(_pointer(address), shape, np.float64)


@njit(**OPTIONS)
def bytes_at(address: int, shape: Any) -> Any:
    """The same of uint8."""
    return carray(_pointer(address), shape, np.uint8)


@njit(**OPTIONS)
def signed_bytes_at(address: int, shape: Any) -> Any:
    """The same of int8."""
    return carray(_pointer(address), shape, np.int8)


@njit(**OPTIONS)
def halves_at(address: int, shape: Any) -> Any:
    """The same of 16 bits, as uint16."""
    return carray(_pointer(address), shape, np.uint16)


@njit(**OPTIONS)
def longs_at(address: int, shape: Any) -> Any:
    """The same of int64."""
    return carray(_pointer(address), shape, np.int64)


@njit(**OPTIONS)
def _halves(table: Any, row: int) -> Any:
    dims = table[row]
    return carray(_pointer(dims[0]), (dims[1], dims[2], dims[3], dims[4], dims[5]), np.uint16)


@njit(**INLINED)
def side_at(address: int) -> Side:
    """The tensors of a table that `door` made."""
    table = carray(_pointer(address), (SIDE_ROWS, ROW), np.int64)
    codes, indices, values, offsets, numbers = table[0], table[5], table[6], table[7], table[_NUMBERS_ROW]
    is_wide = numbers[3]
    dims = (indices[1], indices[2], indices[3], indices[4])
    return Side(
        carray(_pointer(codes[0]), (codes[1], codes[2], codes[3], codes[4], codes[5]), np.uint8),
        _halves(table, 1),
        _halves(table, 2),
        _halves(table, 3),
        _halves(table, 4),
        carray(_pointer(indices[0]), (dims[0], dims[1], dims[2], dims[3] * (1 - is_wide)), np.int16),
        carray(_pointer(indices[0]), (dims[0], dims[1], dims[2], dims[3] * is_wide), np.int32),
        carray(_pointer(values[0]), (values[1], values[2], values[3], values[4]), np.uint16),
        carray(_pointer(offsets[0]), (offsets[1], offsets[2], offsets[3], offsets[4]), np.int32),
        numbers[0] != 0,
        numbers[1],
        numbers[2],
        numbers[5],
    )


def rows_of_layout(layout: CodeLayout) -> list[list[int]]:
    """The rows of a table that are the layout's."""
    tensors = [each for each in layout if isinstance(each, np.ndarray)]
    return [[each.ctypes.data, *each.shape, *[0] * (ROW - 1 - each.ndim)] for each in tensors]


def table_of_layout(layout: CodeLayout) -> np.ndarray:
    """A table with nothing but a layout."""
    numbers = [0, 0, 0, 0, layout.row_size, 0]
    return np.array([*[[0] * ROW] * _LAYOUT_ROW, *rows_of_layout(layout), numbers], dtype=np.int64)


@njit(**INLINED)
def layout_at(address: int) -> CodeLayout:
    """The layout that stands in the same table."""
    table = carray(_pointer(address), (SIDE_ROWS, ROW), np.int64)
    vectors, ends = table[_LAYOUT_ROW, 1], table[_LAYOUT_ROW + 5, 1]
    return CodeLayout(
        carray(_pointer(table[_LAYOUT_ROW, 0]), (vectors,), np.int64),
        carray(_pointer(table[_LAYOUT_ROW + 1, 0]), (vectors,), np.int32),
        carray(_pointer(table[_LAYOUT_ROW + 2, 0]), (vectors,), np.float32),
        carray(_pointer(table[_LAYOUT_ROW + 3, 0]), (vectors, table[_LAYOUT_ROW + 3, 2]), np.int64),
        carray(_pointer(table[_LAYOUT_ROW + 4, 0]), (vectors,), np.uint8),
        carray(_pointer(table[_LAYOUT_ROW + 5, 0]), (ends,), np.int64),
        table[_NUMBERS_ROW, 4],
    )
