"""Vectors of several rows at once: what each of them does, against NumPy, for as many rows as there can be."""

import numpy as np
import pytest
from numba import njit

from kvcache_plugins.ops.compiled.row_vectors import (
    ROWS,
    add_row_products,
    add_to_rows,
    add_turned,
    add_weighted,
    no_sums,
    sums_of_two,
)
from kvcache_plugins.ops.compiled.vectors import LANES, load_floats, store_floats


PLACE, TOKEN = 8, 1


@njit
def everything(used, rows, others, weights, angles, totals, result):
    a, b = load_floats(rows, 0, 0), load_floats(others, 0, 0)
    first = add_row_products(no_sums(used), a, rows, PLACE)
    first = add_weighted(first, b, weights, 2)
    second = add_turned(no_sums(used), a, rows, others, angles, weights, TOKEN, PLACE)
    add_to_rows(totals, PLACE, first)
    store_floats(result, 0, 0, sums_of_two(first, second))


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_every_row_has_a_sum_of_its_own(num_rows) -> None:
    numbers = np.random.default_rng(0)
    rows, others, weights, angles, totals = (
        numbers.standard_normal((ROWS, 2 * LANES), dtype=np.float32) for _ in range(5)
    )
    before, result = totals.copy(), np.full((1, LANES), np.nan, dtype=np.float32)
    everything((0,) * num_rows, rows, others, weights, angles, totals, result)

    a, b, here = rows[0, :LANES], others[0, :LANES], slice(PLACE, PLACE + LANES)
    used = range(num_rows)
    first = np.array([a * rows[r, here] + b * weights[0, 2 + r] for r in used])
    cosine, sine = a * angles[TOKEN, here], a * weights[TOKEN, here]
    second = np.array([cosine * rows[r, here] + sine * others[r, here] for r in used])
    expected = before.copy()
    expected[:num_rows, here] += first
    np.testing.assert_allclose(totals, expected, atol=1e-5)
    sums = np.zeros((2, ROWS))
    sums[:, :num_rows] = first.sum(1), second.sum(1)
    np.testing.assert_allclose(result[0], sums.ravel(), atol=1e-4)
