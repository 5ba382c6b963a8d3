"""Pages of a pool in files instead of memory.

A page's file has no name: it is gone when the page is, or the process, however it ends. What a step reads of it is
brought to memory by the system, which keeps it as long as nothing else needs the room: the host's page cache is the
tier between disk and attention. Files are mapped, but what is mapped is let go of as soon as it was copied or written:
around a block that is read the system maps all others that are cached, and the whole pool would soon count as the
process's memory.

A token's key and value of one head lie together, so that most tokens that are chosen are a single block of the disk.
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch


# More stretches of blocks than that are not worth asking for one by one
_MOST_STRETCHES = 4096


class DiskPages:
    """
    Makes pages in a folder, and says which of their bytes are needed.

    Args:
        folder (`Path`): where the files are. It has to be there.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def new_page(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """
        A tensor of zeros whose bytes are a file's.

        Raises:
            MemoryError: if the disk has no room for it.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return torch.zeros(shape, dtype=dtype)
        with tempfile.TemporaryFile(dir=self.folder, prefix="kvcache-pool-") as file:
            try:
                # Or else a full disk would end the process when the page is written to
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise MemoryError(f"{self.folder} has no room for {num_bytes} bytes: {error.strerror}") from error
            mapped = mmap.mmap(file.fileno(), num_bytes)
        # Tokens that are chosen are neighbours by chance alone
        mapped.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapped, dtype=dtype).view(*shape)

    def release(self, page: torch.Tensor) -> None:
        """Lets go of what is mapped of a page: its bytes stay in its file, and in the system's cache."""
        _advise(page.data_ptr(), page.nbytes, mmap.MADV_DONTNEED)

    def gather(self, pages: Sequence[torch.Tensor], slots: torch.Tensor, items: slice) -> torch.Tensor:
        """
        As `ops.gather.gather_rows`, with one page mapped at a time.

        Args:
            pages (`Sequence[torch.Tensor]`): `[B, H, tokens of a page, row]` each.
            slots (`torch.Tensor` of shape `[items, H, K]`): which rows of all pages one behind the other.
            items (`slice`): items of the batch that they are rows of.
        """
        page_tokens, row_dim = pages[0].shape[2:]
        rows = pages[0].new_empty(*slots.shape, row_dim)
        numbers = slots // page_tokens
        for number in numbers.unique().tolist():
            places = (numbers == number).nonzero(as_tuple=True)
            rows[places] = pages[number][items][places[0], places[1], slots[places] - number * page_tokens]
            self.release(pages[number])
        return rows

    def expect(self, pages: Sequence[torch.Tensor], slots: torch.Tensor, count: torch.Tensor) -> None:
        """
        Has the system read what will be asked for soon.

        Args:
            pages (`Sequence[torch.Tensor]`): `[B, H, tokens of a page, row]` each.
            slots (`torch.Tensor` of shape `[B, H, K]`): which rows of all pages one behind the other.
            count (`torch.Tensor` of shape `[B, H]`): how many of the slots of each head, the first ones.
        """
        blocks = _blocks_of(pages, slots, count)
        stretches = [(page.data_ptr(), *each) for page, own in zip(pages, blocks, strict=True) for each in _runs(own)]
        if len(stretches) > _MOST_STRETCHES:
            # Asking takes longer than the faults that it saves
            return
        for address, first, length in stretches:
            _advise(address + first * mmap.PAGESIZE, length * mmap.PAGESIZE, mmap.MADV_WILLNEED)


def _blocks_of(pages: Sequence[torch.Tensor], slots: torch.Tensor, count: torch.Tensor) -> list[torch.Tensor]:
    """For each page the numbers of the memory's blocks that its chosen rows lie in, in order."""
    batch_size, num_heads, page_tokens, row_dim = pages[0].shape
    row_bytes = row_dim * pages[0].element_size()
    is_chosen = torch.arange(slots.shape[2]) < count[..., None]
    heads = torch.arange(batch_size * num_heads).view(batch_size, num_heads, 1).expand_as(slots)[is_chosen]
    slots = slots[is_chosen]
    numbers = slots // page_tokens
    start = (heads * page_tokens + slots % page_tokens) * row_bytes
    blocks = []
    for number in range(len(pages)):
        own = start[numbers == number]
        ends = torch.cat([own // mmap.PAGESIZE, (own + row_bytes - 1) // mmap.PAGESIZE])
        blocks.append(ends.unique())
    return blocks


def _runs(blocks: torch.Tensor) -> list[tuple[int, int]]:
    """First number and length of every run of consecutive ones."""
    if not len(blocks):
        return []
    breaks = (blocks.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(blocks)]
    return [(int(blocks[start]), stop - start) for start, stop in zip(edges, edges[1:], strict=False)]


def _advise(address: int, length: int, advice: int) -> None:
    """`madvise`, which Python has for the mapping as an object alone: pages are tensors."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice))
