"""A plugin of pytest: whatever kernel a test runs at the lowest level is run once more, as a program for another
machine, on a copy of its memory, and has to leave the same there. `REPLAY` is the command of `replay.c`.

Memory that a call reaches is found from its address on: any word of a structure or of a tensor of integers that is an
address within a living tensor or structure counts as a pointer to it. So no kernel needs a description here.
"""

import bisect
import ctypes
import gc
import os
import shlex
import struct
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvcache_plugins.kernels import library


# Codes next to the middle between two may fall to either side, as sums are rounded otherwise
MOST_UNLIKE = 1e-3
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Buffer(NamedTuple):
    """A tensor's memory, of the dtypes that tensors take it for, or a structure's, of none."""

    start: int
    size: int
    dtypes: set[torch.dtype]

    def holds_addresses(self) -> bool:
        """Tells whether there may be addresses in it."""
        return not self.dtypes or torch.int64 in self.dtypes


def buffers_alive() -> list[Buffer]:
    """Lists all memory of tensors and structures in this process, by address, without parts of others."""
    found: dict[tuple[int, int], Buffer] = {}
    for each in gc.get_objects():
        kind = type(each)
        if kind in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            place = storage.data_ptr(), storage.nbytes()
            found.setdefault(place, Buffer(*place, set())).dtypes.add(each.dtype)
        elif issubclass(kind, (ctypes.Structure, ctypes.Array)):
            place = ctypes.addressof(each), ctypes.sizeof(each)
            found.setdefault(place, Buffer(*place, set()))
    whole: list[Buffer] = []
    for buffer in sorted(found.values(), key=lambda each: (each.start, -each.size)):
        if buffer.size and (not whole or buffer.start >= whole[-1].start + whole[-1].size):
            whole.append(buffer)
    return whole


class Recording:
    """
    A call as it is before it runs.

    Args:
        address (`int`): address of the kernel's structure.
    """

    def __init__(self, address: int):
        alive = buffers_alive()
        starts = [buffer.start for buffer in alive]
        self.buffers: list[Buffer] = []
        self._addresses: list[tuple[int, int, int, int]] = []

        def follow(value: int, number: int, place: int) -> None:
            at = bisect.bisect_right(starts, value) - 1
            if at < 0 or value >= starts[at] + alive[at].size:
                return
            if alive[at] not in self.buffers:
                self.buffers.append(alive[at])
            self._addresses.append((number, place, self.buffers.index(alive[at]), value - starts[at]))

        follow(address, -1, -1)
        for number, buffer in enumerate(self.buffers):
            if buffer.holds_addresses():
                words = struct.unpack(f"{buffer.size // 8}q", ctypes.string_at(buffer.start, buffer.size // 8 * 8))
                for place, word in enumerate(words):
                    follow(word, number, 8 * place)
        self._contents = self.contents()

    def contents(self) -> list[bytes]:
        """The memory as it is now."""
        return [ctypes.string_at(buffer.start, buffer.size) for buffer in self.buffers]

    def without_addresses(self, number: int, content: bytes) -> bytes:
        """Replaces in a buffer's content what was taken for an address."""
        replaced = bytearray(content)
        for own, place, *_ in self._addresses:
            if own == number:
                replaced[place : place + 8] = bytes(8)
        return bytes(replaced)

    def replay(self, kernel: str) -> list[bytes]:
        """The memory as the other machine leaves it."""
        sizes = [buffer.size for buffer in self.buffers]
        numbers = [len(sizes), len(self._addresses), *sizes, *(part for each in self._addresses for part in each)]
        command = [*shlex.split(os.environ["REPLAY"]), kernel]
        given = b"".join([struct.pack(f"{len(numbers)}q", *numbers), *self._contents])
        output = subprocess.run(command, input=given, capture_output=True, check=True).stdout
        places = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        return [output[start:end] for start, end in zip(places, places[1:], strict=False)]


def compare(kernel: str, dtypes: set[torch.dtype], own: bytes, other: bytes) -> None:
    """Fails unless memory of a tensor is the same, to rounding."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    if own == other:
        return
    if floats:
        expected, got = (torch.frombuffer(bytearray(each), dtype=floats[0]) for each in (own, other))
        tolerance = TOLERANCES.get(floats[0], 1e-4)
        close = torch.isclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert close.all(), f"{kernel}: {expected[~close]} here, {got[~close]} there"
    else:
        unlike = sum(a != b for a, b in zip(own, other, strict=True))
        assert unlike <= max(1, MOST_UNLIKE * len(own)), f"{kernel}: {unlike} of {len(own)} bytes"


def replayed(function: Callable[..., Callable[[int], None]]) -> Callable[[str, str], Callable[[int], None]]:
    """Gives the kernels of a function that finds them, replayed each time."""

    def find(name: str, level: str) -> Callable[[int], None]:
        kernel = function(name, level)
        if level != library.levels_here()[0]:
            return kernel

        def run(address: int) -> None:
            recording = Recording(address)
            kernel(address)
            pairs = zip(recording.buffers, recording.contents(), recording.replay(name), strict=True)
            for number, (buffer, own, other) in enumerate(pairs):
                # A structure holds addresses, which differ; memory that was never written may look as if it did
                if buffer.dtypes:
                    compare(
                        name,
                        buffer.dtypes,
                        recording.without_addresses(number, own),
                        recording.without_addresses(number, other),
                    )
            counts[name] = counts.get(name, 0) + 1

        return run

    return find


counts: dict[str, int] = {}


def pytest_configure() -> None:
    """Sets in before anything asks for a kernel; all tasks are done by one thread."""
    library._function = replayed(library._function)
    library.run_on_threads = lambda kernel, address, threads, flags: kernel(address)


def pytest_terminal_summary(terminalreporter) -> None:
    """Says which kernels were replayed."""
    terminalreporter.write_line(f"replayed: {dict(sorted(counts.items()))}")
