"""Says that kernels for a GPU are compiled, once: what seems to hang is at work."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from .tables import print_line


@cache
def announce_compilation(device: str) -> None:
    """
    From now on Triton's compilations in this process are announced on standard error, by one line, once.

    Args:
        device (`str`): for which kind of device; on `"cpu"` nothing is compiled.
    """
    if device != "cpu" and find_spec("triton") is not None:
        _announce_triton()


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
