"""How tensors reach compiled code: by address.

A decode step calls the compiled attention once a layer with some sixty arrays, and wrapping each for the call takes
longer than the attention itself. So a table of addresses and dimensions is made once for compressed states, compiled
code makes its arrays of that, and what changes from step to step is one small table more. Tensors have to be
contiguous, and whoever calls keeps them alive.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, float64, int8, int16, int32, int64, njit, types, uint8, uint16
from numba.core import cgutils

from .layout import CodeLayout
from .new_arrays import array_of, dims_of
from .primitives import INLINED
from .vectors import untyped_intrinsic


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


def _make_array_at(element: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims = dims_of(context, builder, signature.args[1], cgutils.unpack_tuple(builder, args[1]))
        data = builder.inttoptr(args[0], context.get_data_type(element).as_pointer())
        return array_of(context, builder, signature.return_type, dims, data)._getvalue()

    def array_at(typing_context: Any, address: Any, shape: Any) -> Any:
        return types.Array(element, len(shape), "C")(int64, shape), generate

    return untyped_intrinsic(array_at)


# Arrays of any dimensions at an address, not checked. `carray` is four functions to be compiled for every shape
floats_at, doubles_at = _make_array_at(float32), _make_array_at(float64)
bytes_at, signed_bytes_at = _make_array_at(uint8), _make_array_at(int8)
# Of 16 bits, as uint16, and as signed
halves_at, shorts_at = _make_array_at(uint16), _make_array_at(int16)
ints_at, longs_at = _make_array_at(int32), _make_array_at(int64)


@njit(**INLINED)
def side_at(address: int) -> Side:
    """The tensors of a table that `door` made."""
    table = longs_at(address, (SIDE_ROWS, ROW))
    codes, scale, zero, low_rank_a, low_rank_b = table[0], table[1], table[2], table[3], table[4]
    indices, values, offsets, numbers = table[5], table[6], table[7], table[_NUMBERS_ROW]
    is_wide = numbers[3]
    dims = (indices[1], indices[2], indices[3], indices[4])
    return Side(
        bytes_at(codes[0], (codes[1], codes[2], codes[3], codes[4], codes[5])),
        halves_at(scale[0], (scale[1], scale[2], scale[3], scale[4], scale[5])),
        halves_at(zero[0], (zero[1], zero[2], zero[3], zero[4], zero[5])),
        halves_at(low_rank_a[0], (low_rank_a[1], low_rank_a[2], low_rank_a[3], low_rank_a[4], low_rank_a[5])),
        halves_at(low_rank_b[0], (low_rank_b[1], low_rank_b[2], low_rank_b[3], low_rank_b[4], low_rank_b[5])),
        shorts_at(indices[0], (dims[0], dims[1], dims[2], dims[3] * (1 - is_wide))),
        ints_at(indices[0], (dims[0], dims[1], dims[2], dims[3] * is_wide)),
        halves_at(values[0], (values[1], values[2], values[3], values[4])),
        ints_at(offsets[0], (offsets[1], offsets[2], offsets[3], offsets[4])),
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
    table = longs_at(address, (SIDE_ROWS, ROW))
    vectors, ends = table[_LAYOUT_ROW, 1], table[_LAYOUT_ROW + 5, 1]
    return CodeLayout(
        longs_at(table[_LAYOUT_ROW, 0], (vectors,)),
        ints_at(table[_LAYOUT_ROW + 1, 0], (vectors,)),
        floats_at(table[_LAYOUT_ROW + 2, 0], (vectors,)),
        longs_at(table[_LAYOUT_ROW + 3, 0], (vectors, table[_LAYOUT_ROW + 3, 2])),
        bytes_at(table[_LAYOUT_ROW + 4, 0], (vectors,)),
        longs_at(table[_LAYOUT_ROW + 5, 0], (ends,)),
        table[_NUMBERS_ROW, 4],
    )
