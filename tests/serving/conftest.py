"""A server on a thread, for the tests of serving."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest


@contextmanager
def _serving(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=600)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def serving() -> Callable[[Any], AbstractContextManager[Any]]:
    """Return a context manager that runs a `CacheServer` on a thread, and stops it."""
    return _serving
