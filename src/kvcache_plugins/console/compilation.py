"""Says that kernels are compiled, which takes up to half a minute once on a CPU: what seems to hang is at work."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any

from .progress import open_progress
from .tables import print_line


@cache
def announce_compilation(device: str) -> None:
    """
    From now on compilations in this process are announced on standard error.

    Args:
        device (`str`): for which kind of device, `"cpu"` (Numba's: by a bar on a terminal, else by one line, once) or
            another (Triton's: by one line, once).
    """
    if device != "cpu":
        if find_spec("triton") is not None:
            _announce_triton()
    elif find_spec("numba") is not None:
        from numba.core import event

        event.register("numba:compile", _make_announcer(event.Listener))


def _announce_triton() -> None:
    from triton import knobs

    others = knobs.runtime.jit_cache_hook
    is_said = False

    def say_once(**compilation: Any) -> bool | None:
        nonlocal is_said
        if not is_said:
            # Whether it lies on the disk already is not known yet
            print_line("Preparing kernels for this GPU: the first time each is compiled, for seconds", stderr=True)
            is_said = True
        return None if others is None else others(**compilation)

    knobs.runtime.jit_cache_hook = say_once


class _Announcer:
    """What listens to Numba: it compiles what a function calls while it compiles the function."""

    depth = 0
    is_said = False

    def on_start(self, _: Any) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        self.stack = ExitStack()
        if sys.stderr.isatty():
            progress = self.stack.enter_context(open_progress())
            task = progress.add_task("Compiling for this CPU, once: up to half a minute", total=None)
            self.stack.callback(progress.remove_task, task)
        elif not self.is_said:
            print_line("Compiling for this CPU, once: this takes up to half a minute", stderr=True)
            self.is_said = True

    def on_end(self, _: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.stack.close()


def _make_announcer(listener: type) -> Any:
    # Numba takes its own kind only, and is not imported before it is needed
    return type("_NumbaAnnouncer", (_Announcer, listener), {})()
