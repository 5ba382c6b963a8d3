"""Kernels that tests are repeated for."""

from importlib.util import find_spec

import pytest


@pytest.fixture(params=["torch", "compiled", "triton"])
def every_scoring_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What scores codes, one after another; skipped where it is not installed."""
    if request.param == "triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)
    return str(request.param)
