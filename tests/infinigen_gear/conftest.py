"""Kernels that tests are repeated for."""

from importlib.util import find_spec

import pytest


@pytest.fixture(params=["torch", "compiled", "triton"])
def every_scoring_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What scores codes, one after another; skipped where it is not installed."""
    package = {"compiled": "numba", "triton": "triton"}.get(request.param)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)
    return str(request.param)
