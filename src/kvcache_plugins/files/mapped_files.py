"""Tensors whose bytes are mapped files: what the system is told of them, and tells."""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def num_blocks(tensor: torch.Tensor) -> int:
    """Blocks of memory that a tensor lies in which begins with one."""
    return -(-tensor.nbytes // mmap.PAGESIZE)


def release(tensor: torch.Tensor) -> None:
    """Lets go of what is mapped of a tensor: its bytes stay in the file, and in the system's cache."""
    first = tensor.data_ptr() % mmap.PAGESIZE
    advise(tensor.data_ptr() - first, tensor.nbytes + first, mmap.MADV_DONTNEED)


def advise(address: int, length: int, advice: int) -> None:
    """`madvise` of memory that begins with a block."""
    _system_call("madvise")(address, length, advice)


def cached_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Which blocks of a tensor, which begins with one, the system has in memory, `[blocks]`, bool."""
    found = torch.zeros(num_blocks(tensor), dtype=torch.uint8, device="cpu")
    _system_call("mincore")(tensor.data_ptr(), tensor.nbytes, found.data_ptr())
    return (found & 1).bool()


def address_of_advise() -> int:
    """Where the system's function itself is, for compiled code."""
    function: Any = _system_call("madvise")
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _system_call(name: str) -> Callable[..., Any]:
    function = getattr(ctypes.CDLL(None), name)
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p if name == "mincore" else ctypes.c_int)
    return function  # type: ignore[no-any-return]
