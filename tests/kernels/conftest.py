"""Engines and levels of instructions in turn, and the cases of `kernel_cases`."""

from typing import Any

import pytest
import torch
from kernel_cases import GROUPS, ROWS

from kvcache_plugins.kernels import library


LEVELS = library.levels_here()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["torch", *LEVELS])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plain PyTorch, and C at all levels of instructions that there are here, as `attend` names kernels."""
    if request.param == "torch":
        return "torch"
    monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", request.param)
    return "compiled"


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each level of instructions in turn."""
    monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", request.param)
    return str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests the cases that they ask for by name."""
    tables: dict[str, dict[str, Any]] = {"row_case": ROWS, "group_case": GROUPS, "case": {**GROUPS, **ROWS}}
    for name in tables.keys() & set(metafunc.fixturenames):
        asked = metafunc.definition.get_closest_marker("cases")
        table = {key: tables[name][key] for key in (asked.args if asked else tables[name])}
        metafunc.parametrize(name, table.values(), ids=table)
