"""A limit to the memory of this process and to what the system caches of its files, as on a host that has no more."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


_MOUNTS, _MEMBERSHIPS = Path("/proc/self/mounts"), Path("/proc/self/cgroup")


@contextmanager
def memory_limit(num_bytes: int | None) -> Iterator[None]:
    """
    Has this process be in a control group of its own, which is given no more memory.

    What was allocated or cached before is not counted: enter it first.

    Args:
        num_bytes (`int`, *optional*): the limit. Without, nothing is done.

    Raises:
        ValueError: if no such group can be made.
    """
    if num_bytes is None:
        yield
        return
    try:
        own, limit_file = _memory_group()
        # In a group of the second version are either processes or groups
        parent = own.parent if limit_file == "memory.max" and (own / "cgroup.type").exists() else own
        group = parent / f"kvcache-plugins-{os.getpid()}"
        group.mkdir()
    except OSError as error:
        raise ValueError(_refusal(error)) from error
    try:
        _enter(group, limit_file, num_bytes)
        yield
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()


def _enter(group: Path, limit_file: str, num_bytes: int) -> None:
    try:
        (group / limit_file).write_text(str(num_bytes), encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    except OSError as error:
        raise ValueError(_refusal(error)) from error


def _refusal(error: OSError) -> str:
    return (
        f"`memory_limit` needs a control group of Linux that this user may make: {error}. Without the option, "
        "`systemd-run --scope -p MemoryMax=...` before the command does the same where there is systemd"
    )


def _memory_group() -> tuple[Path, str]:
    """The folder of the control group that limits this process's memory, and what its limit's file is called."""
    mounts = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    groups = [line.split(":", 2) for line in _MEMBERSHIPS.read_text(encoding="utf-8").splitlines()]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            place = next(mount[1] for mount in mounts if mount[2] == "cgroup" and "memory" in mount[3].split(","))
            return Path(place + path), "memory.limit_in_bytes"
    for _, controllers, path in groups:
        unified = next((mount[1] for mount in mounts if mount[2] == "cgroup2"), None)
        if not controllers and unified is not None:
            return Path(unified + path), "memory.max"
    raise FileNotFoundError("no control groups are mounted")
