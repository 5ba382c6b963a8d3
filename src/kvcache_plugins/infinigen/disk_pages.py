"""Pages of a pool in files instead of memory.

A page's file has no name: it is gone when the page is, or the process, however it ends. What is mapped of it is let go
of as soon as it was copied or written: around a block that is read the system maps all others that are cached, and the
whole pool would soon count as the process's memory.

A new page is written with zeros before tokens are, as the page cache has a file in pieces as large as it was written
in: mapping it then takes half of the time, letting go of it a sixth, the first writes to it a fiftieth. What is
touched is mapped by such pieces, so they must not be too large.

Once a read had to wait for the disk, what will be needed and the system does not have is asked for ahead. A token's
key and value of one head lie together, so that most tokens that are chosen are a single block of the disk.
"""

import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kvcache_plugins.files.mapped_files import advise, cached_blocks, num_blocks, release


# Bytes that are written, or asked for, by one call: of more, Linux reads no more than 128 KiB ahead
_PIECE = 1 << 17


class DiskPages:
    """Makes pages in a folder, and has the system read ahead of what is read once a read `has_waited` for the disk."""

    def __init__(self, folder: str | Path):
        self.folder = folder
        self.has_waited = False

    def new_page(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor of zeros whose bytes are a file's; a `MemoryError` if the disk has no room for it."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        with tempfile.TemporaryFile(dir=self.folder, prefix="kvcache-pool-") as file:
            try:
                # Or else a full disk would end the process when the page is written to
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise MemoryError(f"{self.folder} has no room for {num_bytes} bytes: {error.strerror}") from error
            for start in range(0, num_bytes, _PIECE):
                file.write(bytes(min(_PIECE, num_bytes - start)))
            file.flush()
            mapped = mmap.mmap(file.fileno(), num_bytes)
        # Tokens that are chosen are neighbours by chance alone
        mapped.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapped, dtype=dtype).view(*shape)

    @contextmanager
    def reading(self, mapped: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """While pages are read: notices when they are not in memory. In the end `mapped` are let go of."""
        before = _num_waits()
        yield
        self.has_waited |= _num_waits() > before
        for page in mapped:
            release(page)

    def expect(self, pages: Sequence[torch.Tensor], slots: torch.Tensor, count: torch.Tensor) -> None:
        """Asks ahead for missing blocks of rows in the first `count` `[B, H]` of each head's slots `[B, H, K]`."""
        if self.has_waited and pages:
            missing = _wanted_blocks(pages, slots, count) & ~torch.stack([*map(cached_blocks, pages)])
            self.has_waited = bool(missing.any())
            for page, block in missing.nonzero().tolist():
                advise(pages[page].data_ptr() + block * mmap.PAGESIZE, mmap.PAGESIZE, mmap.MADV_WILLNEED)

    def expect_page(self, page: torch.Tensor) -> None:
        """Asks for a whole page ahead, as `expect` does for rows."""
        if self.has_waited:
            for start in range(0, page.nbytes, _PIECE):
                advise(page.data_ptr() + start, min(_PIECE, page.nbytes - start), mmap.MADV_WILLNEED)


def _wanted_blocks(pages: Sequence[torch.Tensor], slots: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Marks the blocks of each page that chosen rows lie in, `[pages, blocks]`, bool; see `DiskPages.expect`."""
    batch_size, num_heads, page_tokens, row_dim = pages[0].shape
    row_bytes = row_dim * pages[0].element_size()
    is_chosen = torch.arange(slots.shape[2], dtype=torch.int64, device="cpu") < count[..., None]
    heads = torch.arange(batch_size * num_heads, dtype=torch.int64, device="cpu")
    heads = heads.view(batch_size, num_heads, 1).expand_as(slots)[is_chosen]
    slots = slots[is_chosen]
    start = (heads * page_tokens + slots % page_tokens) * row_bytes
    wanted = torch.zeros(len(pages), num_blocks(pages[0]), dtype=torch.bool, device="cpu")
    # Rows are shorter than blocks, or nearly: between the first and the last one there is none
    for byte in {0, row_bytes // 2, row_bytes - 1}:
        wanted[slots // page_tokens, (start + byte) // mmap.PAGESIZE] = True
    return wanted


def _num_waits() -> int:
    """Counts the times that this process had to wait for the disk when it touched memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
