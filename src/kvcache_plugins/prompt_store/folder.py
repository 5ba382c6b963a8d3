"""The folder of a store: locks of readers and writers, leases of blocks in use, and eviction when it is full.

    .lock                 locked by readers together, and by a process that changes a file alone; the system unlocks it
                          when a process ends, however it ends
    blocks/ab/abc...      a file for each block
    leases/...            a file for each prompt in use, locked by its process: keys of its blocks

A file is touched whenever it is used, a prompt's first blocks as the newest, so that no block needs the least recently
used one.
"""

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvcache_plugins.files.locks import lock


_SUFFIX = ".safetensors"
OWNER_ALONE = 0o600
FOLDER_OWNER_ALONE = 0o700


class StoredFile(NamedTuple):
    """File of a block: its path, bytes, and time of its last use in nanoseconds."""

    path: Path
    num_bytes: int
    used_at: int


class StoreFolder:
    """Files of blocks by key, in a folder for its owner alone; a `ValueError` if the folder cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            for each in (path, path / "blocks", path / "leases"):
                each.mkdir(mode=FOLDER_OWNER_ALONE, parents=each is path, exist_ok=True)
        except OSError as error:
            raise ValueError(f"`folder`: {path} cannot be made: {error.strerror}") from error

    def path_of(self, key: str) -> Path:
        """Return the path of a block, whether it exists or not."""
        return self.path / "blocks" / key[:2] / f"{key}{_SUFFIX}"

    @contextmanager
    def locked(self, *, writing: bool = False) -> Iterator[None]:
        """Hold the folder's lock: shared, or exclusive for `writing`. Not reentrant."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, OWNER_ALONE)
        try:
            lock(descriptor, is_shared=not writing)
            yield
        finally:
            os.close(descriptor)

    def touch(self, keys: Sequence[str]) -> None:
        """Set the time of last use of a prompt's blocks, the latest for the first."""
        now = time.time_ns()
        for number, key in enumerate(keys):
            with suppress(FileNotFoundError):
                os.utime(self.path_of(key), ns=(now, now + len(keys) - number))

    def files(self) -> list[StoredFile]:
        """List the files of all blocks, the least recently used first."""
        found = []
        for path in (self.path / "blocks").glob(f"*/*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append(StoredFile(path, status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda file: file.used_at)

    def make_room(self, num_bytes: int, max_bytes: int, kept: Iterable[str]) -> bool:
        """
        Evict least recently used blocks, none in use or `kept`, until `num_bytes` more fit; return True if they do.
        """
        files = self.files()
        too_many = sum(file.num_bytes for file in files) + num_bytes - max_bytes
        if too_many <= 0:
            return True
        in_use = {*kept, *self._leased_keys()}
        for file in files:
            if too_many <= 0:
                break
            if file.path.stem not in in_use:
                file.path.unlink(missing_ok=True)
                too_many -= file.num_bytes
        return too_many <= 0

    def sweep(self) -> None:
        """Remove files that killed processes have left. The caller holds the exclusive lock, so no file is in use."""
        for path in (self.path / "blocks").glob("*/.*.tmp"):
            path.unlink(missing_ok=True)
        self._leased_keys()

    def _leased_keys(self) -> set[str]:
        """Return the keys of all blocks in use, and remove the leases of processes that have ended."""
        keys: set[str] = set()
        for path in (self.path / "leases").iterdir():
            with suppress(FileNotFoundError):
                with open(path, "rb") as file:
                    is_over = lock(file.fileno(), is_shared=True, is_waiting=False)
                    keys.update(() if is_over else file.read().decode("ascii", errors="replace").split())
                if is_over:
                    path.unlink()
        return keys


class Lease:
    """
    Lease on blocks of a store's folder: they are not evicted until it or this process ends. Their keys are in a file
    that the process locks.

    To be made while the folder is locked.
    """

    def __init__(self, folder: Path, keys: Iterable[str]) -> None:
        self._path = folder / "leases" / secrets.token_hex(8)
        self._process = os.getpid()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, OWNER_ALONE)
        try:
            lock(self._descriptor)
            self.add(keys)
        except BaseException:
            self.end()
            raise

    def add(self, keys: Iterable[str]) -> None:
        """Add blocks, while the folder is locked."""
        os.write(self._descriptor, "".join(f"{key}\n" for key in keys).encode())

    def end(self) -> None:
        """End the lease; a forked process does not end its parent's."""
        # Windows cannot remove an open file
        os.close(self._descriptor)
        if os.getpid() == self._process:
            self._path.unlink(missing_ok=True)
