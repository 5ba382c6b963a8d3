"""A network of its own for the ranks of one machine, whose links can be made slower: Linux's network namespaces.

Every rank's process gets a namespace with one interface; virtual cables lead from them to a switch in a further
namespace. The machine's own network is not touched. A token bucket (`tc ... tbf`) at every interface bounds what
leaves it. It takes root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any


INTERFACE = "ranks0"
_PREFIX = "kvcache_plugins"
_CLONE_NEWNET = 0x40000000
# What may leave at once: a segment that the kernel has not cut up yet is of up to 64 KiB, and for high rates timers
# tick too rarely
_MIN_BURST = 1 << 17
_TICKS_PER_SECOND = 1000
# How long a packet may wait for its turn
_QUEUE_SECONDS = 0.1


class IsolatedNetwork:
    """
    Namespaces joined by a switch; used in a `with` statement, at whose end they are gone.

    Args:
        size (`int`): how many ranks.

    Attributes:
        namespaces (`list[str]`): the namespace of every rank.

    Raises:
        ValueError: if this is not Linux, the user is not root, or `ip` or `tc` are missing or refuse.
    """

    def __init__(self, size: int):
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise ValueError("`throttle` needs root on Linux, for network namespaces and `tc`")
        missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
        if missing:
            raise ValueError(
                f"`throttle` needs the programs `ip` and `tc` (package iproute2), but not found: {missing}"
            )
        if not 1 <= size <= 200:
            raise ValueError(f"`world_size` has to be 1 to 200 with `throttle` but got {size}")
        self.namespaces = [f"{_PREFIX}-{os.getpid()}-{rank}" for rank in range(size)]
        self._switch = f"{_PREFIX}-{os.getpid()}-switch"
        self._old_handler: Any = None

    def __enter__(self) -> IsolatedNetwork:
        _remove_left_over()
        if threading.current_thread() is threading.main_thread():
            # By default nothing is tidied up after it
            self._old_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for rank, name in enumerate(self.namespaces):
                _run("ip", "netns", "add", name)
                cable = ("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", f"port{rank}")
                _run("ip", *cable, "netns", self._switch)
                _run("ip", "-n", self._switch, "link", "set", f"port{rank}", "master", "switch", "up")
                _run("ip", "-n", name, "address", "add", f"10.0.0.{rank + 1}/24", "dev", INTERFACE)
                _run("ip", "-n", name, "link", "set", INTERFACE, "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def throttle(self, bytes_per_second: float) -> None:
        """Bounds what leaves every rank, from now on."""
        if not bytes_per_second >= 1000:
            raise ValueError(f"`throttle` has to leave at least 1000 bytes a second but got {bytes_per_second:g}")
        burst = max(_MIN_BURST, int(bytes_per_second / _TICKS_PER_SECOND))
        bucket = ("rate", f"{int(bytes_per_second)}bps", "burst", str(burst))
        for name in self.namespaces:
            where = ("dev", INTERFACE, "root", "tbf")
            _run("tc", "-n", name, "qdisc", "replace", *where, *bucket, "latency", f"{_QUEUE_SECONDS}s")

    def _remove(self) -> None:
        for name in (*self.namespaces, self._switch):
            # Not there, if making them failed
            with suppress(ValueError):
                _run("ip", "netns", "delete", name)
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None


def enter_namespace(name: str) -> None:
    """Moves the calling thread, and those that it starts from now on, into a network namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as file:
        # `os.setns` is there from Python 3.12 on
        if library.setns(file.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {name}: {os.strerror(number)}")


def _run(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise ValueError(f"`throttle`: `{' '.join(command)}` failed: {finished.stderr.strip()}")
    return finished.stdout


def _remove_left_over() -> None:
    """Namespaces of processes that were killed before they could remove them."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        process = rest.partition("-")[0]
        if prefix == _PREFIX and process.isdigit() and not os.path.exists(f"/proc/{process}"):
            with suppress(ValueError):
                _run("ip", "netns", "delete", name)
