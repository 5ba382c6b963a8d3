"""The compiled library of CPU kernels: which level of it runs, on which threads, and what may be handed to it.

Kernels take one address: of a structure of `ctypes` that holds numbers and further addresses. Every tensor gets into
such a structure by `address_of`, which believes nothing: a kernel reads and writes wherever it is told to.
"""

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from .build import digest, levels, library_name


# Tests name another, of a library that is compiled with sanitizers
FOLDER = Path(os.environ.get("KVCACHE_PLUGINS_KERNEL_LIBRARY", Path(__file__).parent / "lib"))
# Asks for a level by name, for instance `plain`: tests run all that the processor has
_LEVEL_VARIABLE = "KVCACHE_PLUGINS_CPU_LEVEL"
# Where threads are, if any were started: not in processes that are forked from it
_PROCESS = os.getpid()
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# Fields of calls are numbers and addresses
LONG, ADDRESS = ctypes.c_int64, ctypes.c_void_p


class Tasks(ctypes.Structure):
    """Tasks that threads share: see `simd.h`. Structures of calls that are run on threads begin with it."""

    _fields_ = (("next", ctypes.c_int64), ("count", ctypes.c_int64), ("ended", ctypes.c_int64))


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
    """Says why there are no compiled kernels, in a sentence; `None` if there are."""
    if _library() is None:
        return "the C kernels are not compiled, or of other sources: run `python -m kvcache_plugins.kernels.build`"
    return None


@cache
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
def _function(name: str, at_level: str) -> Callable[[int], None]:
    found = getattr(_library(), f"kvc_{name}_{at_level}")
    return _FUNCTION(ctypes.cast(found, ctypes.c_void_p).value or 0)


def function(name: str) -> Callable[[int], None]:
    """The kernel of a name, at this machine's level: a function of the address of its structure."""
    return _function(name, level())


def num_threads() -> int:
    """Threads that there are for tasks: one in a forked process, for which GNU's OpenMP would never end its work."""
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


def run(kernel: Callable[[int], None], call: ctypes.Structure, threads: int) -> None:
    """Runs a kernel on the structure of a call, on so many threads at once; returns when all have ended."""
    run_at(kernel, ctypes.addressof(call), threads)


def run_at(kernel: Callable[[int], None], address: int, threads: int) -> None:
    """Runs a kernel on the structure at an address, as `run` does."""
    if threads > 1:
        _start_threads()(kernel, address, threads)
    else:
        kernel(address)


@cache
def _start_threads() -> Callable[[Callable[[int], None], int, int], None]:
    """Finds a function that calls a kernel on several threads at once, and returns when all have ended."""
    try:
        # PyTorch's own OpenMP, whose threads are there already: looked for in what PyTorch's library needs itself
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return _run_on_python_threads
    parallel.argtypes = [_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return lambda kernel, address, count: parallel(kernel, address, count, 0)


def _run_on_python_threads(kernel: Callable[[int], None], address: int, count: int) -> None:
    threads = [threading.Thread(target=kernel, args=(address,)) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    kernel(address)
    for thread in threads:
        thread.join()


def address_of(
    name: str, tensor: torch.Tensor, dtype: torch.dtype | Sequence[torch.dtype], shape: Sequence[int | None]
) -> int:
    """
    The address of a tensor that a kernel is to read or write.

    Args:
        name (`str`): what errors call it.
        tensor (`torch.Tensor`): contiguous, on the CPU. Whoever calls keeps it alive.
        dtype (`torch.dtype`, or several): what the kernel takes it for.
        shape (`Sequence[int | None]`): sizes that it has to have; `None` may be any.

    Raises:
        ValueError: if it is anything else than that.
    """
    is_known = tensor.dtype is dtype or not isinstance(dtype, torch.dtype) and tensor.dtype in dtype
    # Equal in most calls, which takes a fraction of comparing one by one
    fits = tensor.shape == shape or (
        tensor.dim() == len(shape)
        and all(size is None or size == own for size, own in zip(shape, tensor.shape, strict=True))
    )
    if not is_known or not fits or not tensor.is_cpu or not tensor.is_contiguous():
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"`{name}` has to be {wanted} of {' or '.join(map(str, allowed))}, contiguous, on the CPU, but got "
            f"{' x '.join(map(str, tensor.shape))} of {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}"
        )
    return tensor.data_ptr()
