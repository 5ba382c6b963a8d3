"""Tests read no clock: what they assert holds on a machine of any speed, however busy it is."""

import ast
from pathlib import Path

import pytest


TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
# Prints times if a person runs it; its tests assert counts
BY_HAND = TESTS / "triton_kernels" / "test_step_costs.py"


def clocks_read(source: str) -> list[int]:
    """Lines that read a clock of the module `time`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for alias in node.names if alias.name.removesuffix("_ns") in CLOCKS]
        is_of_time = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
        if is_of_time and node.attr.removesuffix("_ns") in CLOCKS:
            found.append(node.lineno)
    return found


def test_no_test_reads_a_clock() -> None:
    files = sorted({*TESTS.rglob("*.py")} - {BY_HAND})
    assert len(files) > 100
    assert [f"{path.relative_to(TESTS)}:{line}" for path in files for line in clocks_read(path.read_text())] == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\nstart = time.monotonic()\n", [2]),
        ("from time import perf_counter_ns\n", [1]),
        ("import time\ntime.sleep(1)\nrow['time']\n", []),
    ],
)
def test_reading_a_clock_is_detected(source: str, lines: list[int]) -> None:
    assert clocks_read(source) == lines
