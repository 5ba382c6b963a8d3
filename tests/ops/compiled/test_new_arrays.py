"""Arrays that compiled functions make: shapes, types, and what they are filled with."""

import numpy as np
from numba import njit

from kvcache_plugins.ops.compiled.new_arrays import filled, zero_flags, zero_floats, zero_ints, zero_longs, zeros


@njit
def make(rows):
    # Memory that was in use is what zeros may not be taken from as it is
    used = filled(rows, 65, 7.0)
    used[0, 0] = 1
    return zeros(rows, 65), zero_floats((rows,)), zero_longs((rows, 2)), zero_ints((1, rows)), zero_flags((rows,))


@njit
def fill(rows, number):
    return filled(rows, 3, number)


def test_zeros() -> None:
    shapes = [(5, 65), (5,), (5, 2), (1, 5), (5,)]
    dtypes = [np.float32, np.float32, np.int64, np.int32, np.bool_]
    for _ in range(3):
        for array, shape, dtype in zip(make(5), shapes, dtypes, strict=True):
            assert (array.shape, array.dtype, array.any()) == (shape, dtype, False)
            assert array.flags.c_contiguous and array.strides == np.zeros(shape, dtype).strides


def test_another_number() -> None:
    np.testing.assert_array_equal(fill(2, -np.inf), np.full((2, 3), -np.inf, dtype=np.float32))
    assert fill(0, 1.0).shape == (0, 3)
