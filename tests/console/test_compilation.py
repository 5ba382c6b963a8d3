"""Compilations say once that they take a while."""

import subprocess
import sys

import pytest

from kvcache_plugins.console.progress import open_progress


# In a process of its own: a listener of Numba's stays
CODE = """
import numba
from kvcache_plugins.console.compilation import announce_compilation

announce_compilation()
announce_compilation()
inner = numba.njit(lambda x: x + 1)
outer = numba.njit(lambda x: inner(x) * 2)
print(outer(1), numba.njit(lambda x: x - 1)(1))
"""


def test_it_is_said_once_in_a_pipe() -> None:
    pytest.importorskip("numba")
    finished = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert finished.stdout == "4 0\n", finished.stderr
    assert finished.stderr == "Compiling for this CPU, once: this takes half a minute\n"


def test_bars_share_one_display() -> None:
    with open_progress() as outer:
        with open_progress() as inner:
            assert inner is outer
        # Still drawn
        assert outer.live.is_started
    with open_progress() as later:
        assert later is not outer
