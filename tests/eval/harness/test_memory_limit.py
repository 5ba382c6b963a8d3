"""A limit to memory: it holds while it is there, and is a clear error where it cannot be had."""

import os
import subprocess
import sys

import pytest

from kvcache_plugins.eval.harness import memory_limit as module
from kvcache_plugins.eval.harness.memory_limit import memory_limit


def groups() -> str:
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        return file.read()


@pytest.fixture
def may_limit():
    try:
        with memory_limit(1 << 34):
            pass
    except ValueError as error:
        pytest.skip(str(error))


def test_within_the_limit(may_limit):
    before = groups()
    with memory_limit(1 << 34):
        assert f"kvcache-plugins-{os.getpid()}" in groups()
    assert groups() == before
    with memory_limit(None):
        assert groups() == before


def test_beyond_the_limit(may_limit):
    code = "from kvcache_plugins.eval.harness.memory_limit import memory_limit\nwith memory_limit(40 << 20):\n"
    done = subprocess.run([sys.executable, "-c", code + "    len(bytearray(400 << 20))"], check=False)
    assert done.returncode == -9


def test_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MEMBERSHIPS", tmp_path / "missing")
    with pytest.raises(ValueError, match="`memory_limit`.*systemd-run"), memory_limit(1 << 34):
        pass
