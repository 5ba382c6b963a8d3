"""Compiled work on the threads that PyTorch has.

Numba would start threads of its own beside PyTorch's, and compile a second time what they share. So work is done by
PyTorch's own OpenMP, whose threads each take the next task of a table until none is left. Where PyTorch has no OpenMP
of that kind (other systems than Linux), threads of Python do the same.

What is called by address, with one table of numbers, is also called in a tenth of the time: Numba would unpack sixty
arguments.
"""

import ctypes
import gc
import os
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import int64, njit, types

from .arrays import longs_at
from .primitives import BORROWING
from .vectors import untyped_intrinsic


# The first numbers of every table: the next task, and how many there are
NEXT, COUNT, FIRST = 0, 1, 2
# A function of a table's address
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SIGNATURE = types.void(int64)
# Where threads are, if any were started: not in processes that are forked from it
_PROCESS = os.getpid()


@untyped_intrinsic
def take_task(typing_context: Any, address: Any) -> Any:
    """
    The number of the next task of a table at an address, which nobody else gets. Whoever gets one sees what had been
    written when those before it were taken.
    """
    number = ir.IntType(64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], number.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(number, 1), "acq_rel")

    return int64(int64), generate


@njit(**BORROWING)
def num_tasks(address: int) -> int:
    """Tasks of a table at an address."""
    return longs_at(address, (FIRST,))[COUNT]  # type: ignore[no-any-return]


@cache
def bits_of(number: float) -> int:
    """A number as a table has it, by the bits that it has as float64."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def run(worker: Any, count: int, numbers: Iterable[int]) -> None:
    """
    Has as many threads as PyTorch is set to take tasks until none is left.

    Args:
        worker: compiled function of the address of a table of int64, which takes its tasks by `take_task`.
        count (`int`): how many there are.
        numbers (`Iterable[int]`): what else the table holds, from `FIRST` on.
    """
    run_table(entry_of(worker), array("q", (0, count, *numbers)), num_threads())


def run_table(entry: Callable[[int], None], table: "array[int]", threads: int) -> None:
    """The same of a table that is there already, with the entry of its worker and no more than some threads."""
    run_at(entry, table.buffer_info()[0], min(threads, table[COUNT]))


def run_at(entry: Callable[[int], None], address: int, threads: int) -> None:
    """The same of a table at an address, with as many threads."""
    if threads > 1:
        _start_threads()(entry, address, threads)
    else:
        entry(address)


def num_threads() -> int:
    """Threads that there are for tasks: one in a forked process, for which GNU's OpenMP would never end its work."""
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


@cache
def entry_of(worker: Any) -> Callable[[int], None]:
    """What runs a worker, given a table's address."""
    with _uncollected():
        compiled = worker.get_compile_result(_SIGNATURE)
    return _ENTRY(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


@contextmanager
def _uncollected() -> Iterator[None]:
    """
    Nothing is looked for that could be freed: a compiler makes millions of objects that live as long as it runs, and
    to go through them again and again took a sixth of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _start_threads() -> Callable[[Any, int, int], None]:
    """What calls an entry with a table's address on several threads at once, and returns when all have ended."""
    try:
        # Looked for in what PyTorch's library needs itself, so that it is the same that PyTorch has
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return _run_on_python_threads
    parallel.argtypes = [_ENTRY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return lambda function, address, count: parallel(function, address, count, 0)


def _run_on_python_threads(function: Callable[[int], None], address: int, count: int) -> None:
    threads = [threading.Thread(target=function, args=(address,)) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    function(address)
    for thread in threads:
        thread.join()
