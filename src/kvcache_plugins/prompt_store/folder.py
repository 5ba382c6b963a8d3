"""The folder of a store: who may read and write when, and what goes when it is full.

    .lock                 readers share it, whoever changes a file has it alone; the system lets go of it when a
                          process ends, however it ends
    blocks/ab/abc...      a file for each block
    leases/...            one for each prompt that is in use, locked by whoever uses it: names of its blocks

A file is touched whenever it is used, a prompt's first blocks as the newest: so the least recently used block is
always one that no other needs.
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
    """A block's file: its path, bytes, and when it was used last, in nanoseconds."""

    path: Path
    num_bytes: int
    used_at: int


class StoreFolder:
    """Keeps files of blocks by name in a folder, made for its owner alone; a `ValueError` if it cannot be made."""

    def __init__(self, path: Path):
        self.path = path
        try:
            for each in (path, path / "blocks", path / "leases"):
                each.mkdir(mode=FOLDER_OWNER_ALONE, parents=each is path, exist_ok=True)
        except OSError as error:
            raise ValueError(f"`folder`: {path} cannot be made: {error.strerror}") from error

    def path_of(self, key: str) -> Path:
        """Where the block of a name is, or would be."""
        return self.path / "blocks" / key[:2] / f"{key}{_SUFFIX}"

    @contextmanager
    def locked(self, *, writing: bool = False) -> Iterator[None]:
        """Nobody else changes a file inside, nor reads any if it is for `writing`; not to be called within itself."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, OWNER_ALONE)
        try:
            lock(descriptor, is_shared=not writing)
            yield
        finally:
            os.close(descriptor)

    def touch(self, keys: Sequence[str]) -> None:
        """Notes that a prompt's blocks are used, the first of them as the last."""
        now = time.time_ns()
        for number, key in enumerate(keys):
            with suppress(FileNotFoundError):
                os.utime(self.path_of(key), ns=(now, now + len(keys) - number))

    def files(self) -> list[StoredFile]:
        """All blocks, those that were used last behind."""
        found = []
        for path in (self.path / "blocks").glob(f"*/*{_SUFFIX}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append(StoredFile(path, status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda file: file.used_at)

    def make_room(self, num_bytes: int, max_bytes: int, kept: Iterable[str]) -> bool:
        """
        Removes least recently used blocks, none in use or `kept`, until `num_bytes` more fit; returns whether they do.
        """
        files = self.files()
        too_many = sum(file.num_bytes for file in files) + num_bytes - max_bytes
        if too_many <= 0:
            return True
        in_use = {*kept, *self._leased()}
        for file in files:
            if too_many <= 0:
                break
            if file.path.stem not in in_use:
                file.path.unlink(missing_ok=True)
                too_many -= file.num_bytes
        return too_many <= 0

    def sweep(self) -> None:
        """Removes, where it is locked for writing, what writers that were killed have left: nobody writes now."""
        for path in (self.path / "blocks").glob("*/.*.tmp"):
            path.unlink(missing_ok=True)
        self._leased()

    def _leased(self) -> set[str]:
        names: set[str] = set()
        for path in (self.path / "leases").iterdir():
            with suppress(FileNotFoundError):
                with open(path, "rb") as file:
                    is_over = lock(file.fileno(), is_shared=True, is_waiting=False)
                    names.update(() if is_over else file.read().decode("ascii", errors="replace").split())
                if is_over:
                    # Of a process that has ended
                    path.unlink()
        return names


class Lease:
    """
    Blocks of a store's folder that stay where they are until it is over, or this process: names in a file that is
    locked for as long. To be made where the folder is locked.
    """

    def __init__(self, folder: Path, keys: Iterable[str]):
        self._path, self._process = folder / "leases" / secrets.token_hex(8), os.getpid()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, OWNER_ALONE)
        try:
            lock(self._descriptor)
            self.add(keys)
        except BaseException:
            self.end()
            raise

    def add(self, keys: Iterable[str]) -> None:
        """More blocks, to be called where nobody removes any."""
        os.write(self._descriptor, "".join(f"{key}\n" for key in keys).encode())

    def end(self) -> None:
        """Ends the lease of all blocks; a forked process ends none of its parent's."""
        # Windows removes no file that is open
        os.close(self._descriptor)
        if os.getpid() == self._process:
            self._path.unlink(missing_ok=True)
