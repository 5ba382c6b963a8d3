"""Locks of open files: by `flock`, and by a byte as on Windows, which a module of the same calls stands in for."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvcache_plugins.files import locks
from kvcache_plugins.files.locks import lock


@pytest.fixture(params=["flock", "byte"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "byte":
        request.getfixturevalue("byte_locks")
    return request.param


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """The same file, opened twice."""
    descriptors = [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    yield descriptors[0], descriptors[1]
    for each in descriptors:
        with suppress(OSError):
            os.close(each)


def test_an_exclusive_lock_lasts_until_its_file_is_closed(kind: str, files: tuple[int, int]) -> None:
    first, second = files
    assert lock(first)
    assert not lock(second, is_waiting=False) and not lock(second, is_shared=True, is_waiting=False)
    os.close(first)
    assert lock(second)


def test_readers_share_a_lock_where_the_system_can(kind: str, files: tuple[int, int]) -> None:
    first, second = files
    assert lock(first, is_shared=True)
    assert lock(second, is_shared=True, is_waiting=False) is (kind == "flock")
    assert not lock(second, is_waiting=False)


def test_a_lock_keeps_position_and_bytes(kind: str, files: tuple[int, int]) -> None:
    first, second = files
    os.write(first, b"abc")
    assert lock(first)
    os.write(first, b"def")
    assert os.read(second, 100) == b"abcdef"


def test_waiting_for_a_byte_lock_ends_when_it_is_released(
    byte_locks: None, files: tuple[int, int], monkeypatch
) -> None:
    first, second = files
    assert lock(first)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: os.close(first))
    assert lock(second)
