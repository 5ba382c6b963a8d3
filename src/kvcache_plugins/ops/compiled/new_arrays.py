"""Arrays that compiled functions make for themselves, each by one intrinsic.

NumPy's own are four functions each, compiled anew for every way in which a shape is written. Memory that cannot be had
is a `MemoryError`, as theirs.
"""

from typing import Any

import numpy as np
from numba import boolean, float32, int32, int64, types
from numba.core import cgutils
from numba.np.arrayobj import populate_array

from .vectors import untyped_intrinsic


MINUS_INFINITY = np.float32(-np.inf)
# Of what is allocated, in bytes: a line of memory
_ALIGNMENT = 64


def array_of(context: Any, builder: Any, kind: Any, dims: list[Any], data: Any, meminfo: Any = None) -> Any:
    """The code of a contiguous array of some type, at a pointer."""
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [context.get_constant(types.intp, size)]
    for dim in dims[:0:-1]:
        strides.insert(0, builder.mul(strides[0], dim))
    pointer = builder.bitcast(data, context.get_data_type(kind.dtype).as_pointer())
    array = context.make_array(kind)(context, builder)
    populate_array(array, data=pointer, shape=dims, strides=strides, itemsize=strides[-1], meminfo=meminfo)
    return array


def dims_of(context: Any, builder: Any, kinds: Any, values: Any) -> list[Any]:
    """The code of dimensions, given as whole numbers of any types."""
    return [context.cast(builder, value, kind, types.intp) for value, kind in zip(values, kinds, strict=True)]


def _new(context: Any, builder: Any, kind: Any, dims: list[Any]) -> Any:
    size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    for dim in dims:
        size = builder.mul(size, dim)
    meminfo = context.nrt.meminfo_alloc_aligned(builder, size, _ALIGNMENT)
    data = context.nrt.meminfo_data(builder, meminfo)
    return array_of(context, builder, kind, dims, data, meminfo), size


def _make_zeros(element: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims = dims_of(context, builder, signature.args[0], cgutils.unpack_tuple(builder, args[0]))
        array, size = _new(context, builder, signature.return_type, dims)
        cgutils.memset(builder, array.data, size, 0)
        return array._getvalue()

    def new_zeros(typing_context: Any, shape: Any) -> Any:
        return types.Array(element, len(shape), "C")(shape), generate

    return untyped_intrinsic(new_zeros)


# Arrays of zeros, of any dimensions
zero_floats, zero_longs, zero_ints, zero_flags = map(_make_zeros, (float32, int64, int32, boolean))


@untyped_intrinsic
def zeros(typing_context: Any, rows: Any, columns: Any) -> Any:
    """A float32 array of zeros, of two dimensions."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims = dims_of(context, builder, signature.args, args)
        array, size = _new(context, builder, signature.return_type, dims)
        cgutils.memset(builder, array.data, size, 0)
        return array._getvalue()

    return types.Array(float32, 2, "C")(rows, columns), generate


@untyped_intrinsic
def filled(typing_context: Any, rows: Any, columns: Any, number: Any) -> Any:
    """The same of one number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims = dims_of(context, builder, signature.args[:2], args[:2])
        array, _ = _new(context, builder, signature.return_type, dims)
        with cgutils.for_range(builder, builder.mul(*dims)) as loop:
            builder.store(args[2], builder.gep(array.data, [loop.index]))
        return array._getvalue()

    return types.Array(float32, 2, "C")(rows, columns, float32), generate
