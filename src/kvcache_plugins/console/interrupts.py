"""Ctrl-C: one line and exit code 130, at whatever moment it comes."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


INTERRUPTED = 130


def end_at_interrupt() -> None:
    """
    Make Ctrl-C raise `KeyboardInterrupt`, or end this process at once during an import, which would print or swallow
    the exception. A process that was started to ignore Ctrl-C, as in the background of a shell, still ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_or_raise)


def end_at_once() -> None:
    """Make Ctrl-C end this process without running more Python, as it is ending in any case."""
    if signal.getsignal(signal.SIGINT) is _end_or_raise:
        signal.signal(signal.SIGINT, _end)


def _end_or_raise(number: int, frame: FrameType | None) -> None:
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            _end(number, frame)
        caller = caller.f_back
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"Interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def interrupts_are_ours() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to all processes: this one ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
