"""The blocks of prompts in a folder: loaded as far as they are sound, written as far as there is room.

Nothing that happens to a file ends a generation: what cannot be loaded is read by the model again, what cannot be
written is not kept, and a warning says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcache_plugins.user_warnings import warn_user

from .block_files import PromptBlock, read_block, write_block
from .folder import Lease, StoreFolder
from .patience import with_patience
from .statistics import StoreStatistics


# Beside the tensors of a block
_DOCUMENT_BYTES = 64 * 1024


@dataclass(frozen=True, eq=False, slots=True)
class PromptKeys:
    """The names of a prompt's blocks: its root, and those of its whole blocks."""

    root: str
    keys: Sequence[str]

    def previous(self, number: int) -> str:
        """The name of what comes before a block."""
        return self.keys[number - 1] if number else self.root


class KeptBlocks:
    """
    Blocks by name.

    Args:
        folder (`StoreFolder`): where they are.
        max_bytes (`int`, *optional*): the most that they take.
        statistics (`StoreStatistics`): counted up.
    """

    def __init__(self, folder: StoreFolder, max_bytes: int | None, statistics: StoreStatistics):
        self.folder, self.max_bytes, self.statistics = folder, max_bytes, statistics
        self._has_warned = False

    def load(self, prompt: PromptKeys) -> tuple[list[PromptBlock], Lease | None]:
        """The blocks of a prompt that are there and sound, from the first on, and a lease on them."""
        started = time.perf_counter()
        blocks: list[PromptBlock] = []
        lease, damage = None, None
        try:
            with self.folder.reading():
                known = prompt.keys[: self.folder.num_known(prompt.keys)]
                # Without room for a lease: blocks may go, once they are loaded
                with suppress(OSError):
                    lease = self.folder.lease(known)
                self.folder.touch(known)
                for number, key in enumerate(with_patience(known, "Loading a prompt")):
                    path = self.folder.path_of(key)
                    status = path.stat()
                    try:
                        block = read_block(path)
                    except ValueError as error:
                        damage = path, status.st_ino, str(error)
                        break
                    assert block.previous == prompt.previous(number), "its name says so"
                    self.statistics.bytes_loaded += status.st_size
                    blocks.append(block)
            if damage is not None:
                self._remove_damaged(*damage)
        except OSError as error:
            warn_user(f"the prompt store cannot be read: {error}")
        self.statistics.blocks_loaded += len(blocks)
        self.statistics.load_seconds += time.perf_counter() - started
        return blocks, lease

    def refuse(self, key: str, reason: str) -> None:
        """Removes a block that is sound as a file, but of which no cache can be made."""
        path = self.folder.path_of(key)
        with suppress(OSError):
            self._remove_damaged(path, path.stat().st_ino, f"`folder`: {path} is damaged: {reason}")

    def _remove_damaged(self, path: Path, inode: int, reason: str) -> None:
        self.statistics.blocks_damaged += 1
        warn_user(f"{reason}; it is removed, and its tokens are read again")
        with self.folder.writing():
            # Somebody may have replaced it meanwhile
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()

    def missing(self, prompt: PromptKeys) -> list[int]:
        """Which blocks of a prompt are not there."""
        return [number for number, key in enumerate(prompt.keys) if not self.folder.path_of(key).exists()]

    def write(self, prompt: PromptKeys, blocks: dict[int, PromptBlock], lease: Lease | None) -> int:
        """
        Writes blocks of a prompt; returns how many, as there may be no room for all.

        Args:
            prompt (`PromptKeys`): the prompt, up to the last of them at least.
            blocks (`dict[int, PromptBlock]`): the blocks by number.
            lease (`Lease`, *optional*): takes them on.
        """
        started, written = time.perf_counter(), 0
        try:
            with self.folder.writing():
                self.folder.sweep()
                for number, block in sorted(blocks.items()):
                    if not self._has_room(block, prompt):
                        break
                    key = prompt.keys[number]
                    if lease is not None:
                        lease.add([key])
                    path = self.folder.make_parent(key)
                    write_block(path, block)
                    written += 1
                    self.statistics.bytes_kept += path.stat().st_size
                self.folder.touch(prompt.keys)
        except OSError as error:
            self._warn(f"the disk takes no more of the prompt, which is read on without being kept: {error}")
        self.statistics.blocks_kept += written
        self.statistics.blocks_not_kept += len(blocks) - written
        self.statistics.keep_seconds += time.perf_counter() - started
        return written

    def _has_room(self, block: PromptBlock, prompt: PromptKeys) -> bool:
        if self.max_bytes is None:
            return True
        tensors = block.piece.tensors.values()
        num_bytes = sum(each.numel() * each.element_size() for each in tensors) + _DOCUMENT_BYTES
        if self.folder.make_room(num_bytes, self.max_bytes, prompt.keys):
            return True
        self._warn(
            f"`max_bytes` is {self.max_bytes}, and all that there is is in use: the prompt is read on without being "
            "kept"
        )
        return False

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(reason)
