"""The compiled library of CPU kernels: which level of it runs, and on which threads.

Kernels take one address: of a structure of `c_structs`.
"""

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from .build import digest, levels, library_name
from .c_structs import Structure


# Tests set it to the folder of a library that is compiled with sanitizers
FOLDER = Path(os.environ.get("KVCACHE_PLUGINS_KERNEL_LIBRARY", Path(__file__).parent / "lib"))
# Name of the level to use, for instance `plain`: tests run all levels of the processor
_LEVEL_VARIABLE = "KVCACHE_PLUGINS_CPU_LEVEL"
# Process that has the threads, if any were started: processes forked from it have none
_PROCESS = os.getpid()
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(FOLDER / library_name(platform.system())))
        library.kvc_sources.restype = ctypes.c_uint32
    except (OSError, AttributeError):
        return None
    # Structures of other sources may have other fields
    return library if library.kvc_sources() == digest() else None


def why_missing() -> str | None:
    """Say why there are no compiled kernels, in a sentence; `None` if there are."""
    if _library() is None:
        return "the C kernels are not compiled, or of other sources: run `python -m kvcache_plugins.kernels.build`"
    return None


def levels_here() -> tuple[str, ...]:
    """Levels of instructions that library and processor have, the lowest first; the last is the default."""
    library = _library()
    if library is None:
        return ()
    library.kvc_level.restype = ctypes.c_char_p
    names = list(levels(platform.machine()))
    return tuple(names[: names.index(library.kvc_level().decode()) + 1])


def level() -> str:
    """
    The level that kernels run at.

    Raises:
        ValueError: if `KVCACHE_PLUGINS_CPU_LEVEL` names one that cannot be had.
    """
    asked = os.environ.get(_LEVEL_VARIABLE)
    if asked is not None and asked not in levels_here():
        raise ValueError(f"`{_LEVEL_VARIABLE}` has to be one of {', '.join(levels_here())}, but got {asked!r}")
    return asked or levels_here()[-1]


@cache
def _function(name: str, asked: str | None) -> Callable[[int], None]:
    """Find a kernel at the level that is asked for; the answer is kept."""
    found = getattr(_library(), f"kvc_{name}_{level()}")
    return _FUNCTION(ctypes.cast(found, ctypes.c_void_p).value or 0)


def num_threads() -> int:
    """Threads that there are for tasks: one in a forked process, for which GNU's OpenMP would never end its work."""
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


def _run_on_python_threads(kernel: Callable[[int], None], address: int, count: int, flags: int) -> None:
    threads = [threading.Thread(target=kernel, args=(address,)) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    kernel(address)
    for thread in threads:
        thread.join()


def _find_threads() -> Callable[[Callable[[int], None], int, int, int], None]:
    try:
        # PyTorch's own OpenMP, whose threads are there already: looked for in what PyTorch's library needs itself
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return _run_on_python_threads
    parallel.argtypes = [_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


# Calls a kernel with an address on a number of threads at once, and returns when all have ended; flags are 0
run_on_threads = _find_threads()


def run(name: str, call: Structure, count: int, most_threads: int | None = None) -> None:
    """
    Run the kernel of a name on its structure; return when all tasks are done.

    Args:
        name (`str`): the kernel.
        call (`Structure`): its structure.
        count (`int`): tasks.
        most_threads (`int`, *optional*): number of threads for which there is scratch; by default all of PyTorch's.
            Their number is read once, as another thread of the program may change it between two lines.
    """
    call.tasks.count = count
    # The body of `num_threads`, as a call would take longer
    most = torch.get_num_threads() if os.getpid() == _PROCESS else 1
    threads, kernel = min(most_threads or most, count), _function(name, os.environ.get(_LEVEL_VARIABLE))
    if threads > 1:
        run_on_threads(kernel, call.address, threads, 0)
    else:
        kernel(call.address)


def bind(name: str, call: Structure, threads: int) -> Callable[[], None]:
    """Return a function without arguments that runs the kernel of a name on its structure, on some threads."""
    kernel = _function(name, os.environ.get(_LEVEL_VARIABLE))
    if threads == 1:
        return partial(kernel, call.address)
    return partial(run_on_threads, kernel, call.address, threads, 0)
