"""Points looked up in registers, by whatever instructions a machine has for it."""

import os
import subprocess
import sys

import pytest


pytest.importorskip("numba")
binding = pytest.importorskip("llvmlite.binding")
# What Numba is told of the processor, and bits of the codes that it then looks up
MACHINES = {
    "avx2": ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+avx2"}, "3"),
    "neither": ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, "0"),
    "this": ({}, None),
}
PROGRAM = """
import numpy as np
from numba import njit
from kvcache_plugins.ops.compiled.fields import load_ints, look_up, lookup_bits
from kvcache_plugins.ops.compiled.vectors import load_floats, store_floats

@njit
def run(table, places, entries):
    found = look_up(load_floats(table, 0, 0), load_floats(table, 0, 8), load_ints(places, 0, 0))
    store_floats(entries, 0, 0, found)
    return lookup_bits()

table = np.arange(16, dtype=np.float32)[None].copy()
places, entries = np.array([[3, 18, 7, 15, 8, 31, 0, 12]], dtype=np.int32), np.zeros((1, 8), dtype=np.float32)
bits = run(table, places, entries)
print(bits, (places % (8 if bits == 3 else 16) == entries).all())
"""


@pytest.mark.parametrize("machine", MACHINES)
def test_entries_are_looked_up_by_their_lowest_bits(machine):
    variables, expected = MACHINES[machine]
    if machine == "avx2" and not binding.get_host_cpu_features().get("avx2"):
        pytest.skip("the processor has no AVX2")
    command = [sys.executable, "-c", PROGRAM]
    finished = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    bits, is_right = finished.stdout.split()
    assert is_right == "True" and bits == (expected or bits)
