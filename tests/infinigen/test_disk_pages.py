"""A pool on disk is the pool in memory, bit for bit; its files have no names, and little of it is resident."""

import copy
import ctypes
import errno
import gc
import mmap
import os
import tempfile
from itertools import count

import pytest
import torch

from kvcache_plugins import InfiniGenCache, InfiniGenTransformCache
from kvcache_plugins.files import mapped_files
from kvcache_plugins.files.mapped_files import cached_blocks, num_blocks
from kvcache_plugins.infinigen import disk_pages
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.disk_pages import DiskPages
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.kernels import tokens
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.tokens import gather_rows


OPTIONS = {"full_layers": (0,), "recent": 8, "sink": 2}


def open_files(folder) -> list[str]:
    """Files below a folder that this process has mapped, those without a name too."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line for line in maps if str(folder) in line]


def resident_bytes(folder) -> int:
    """Bytes of such files that are in this process's memory."""
    total, is_ours = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as maps:
        for line in maps:
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                is_ours = str(folder) in line
            elif is_ours and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


@pytest.mark.each_value
@pytest.mark.parametrize("cache_class", [InfiniGenCache, InfiniGenTransformCache])
@pytest.mark.parametrize("speculate", [True, False])
def test_equals_the_pool_in_memory(tiny_llama, tmp_path, cache_class, speculate):
    input_ids = torch.randint(3, 128, (2, 1300))
    mask = torch.ones_like(input_ids)
    mask[1, :40] = 0
    options = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    found = []
    for folder in (None, tmp_path):
        with cache_class(tiny_llama, speculate=speculate, pool_folder=folder, **OPTIONS) as cache:
            found.append(tiny_llama.generate(input_ids, past_key_values=cache, **options))
            counters = cache.stats()
            assert len(open_files(tmp_path)) == (2 if folder else 0) and os.listdir(tmp_path) == []
            cache.reorder_cache(torch.tensor([1, 0]))
            found.append(tiny_llama(input_ids[:, :5], past_key_values=cache).logits)
        found.append(counters)
    assert torch.equal(found[0].sequences, found[3].sequences)
    assert all(torch.equal(*pair) for pair in zip(found[0].logits, found[3].logits, strict=True))
    assert torch.equal(found[1], found[4]) and found[2] == found[5]


def test_files_are_gone_with_the_cache(tiny_llama, tmp_path):
    cache = InfiniGenCache(tiny_llama, pool_folder=tmp_path, **OPTIONS)
    with torch.no_grad():
        tiny_llama(torch.randint(3, 128, (1, 200)), past_key_values=cache)
    copied = copy.deepcopy(cache)
    assert len(open_files(tmp_path)) == 2 and os.listdir(tmp_path) == []
    tokens = torch.randint(3, 128, (1, 1))
    with torch.no_grad():
        logits = [tiny_llama(tokens, past_key_values=each).logits for each in (cache, copied)]
    assert torch.equal(*logits)
    del cache, copied
    gc.collect()
    assert open_files(tmp_path) == []


def decode_states(folder, keys, values, queries) -> torch.Tensor:
    """Attention of queries one by one over a layer's states."""
    layer = InfiniGenLayer(InfiniGenConfig(pool_folder=folder, share=0.01), 1)
    layer.update(keys, values)
    layer.settle_prompt()
    outputs = []
    for query in queries:
        new = query[:, : keys.shape[1]]
        layer.update(new, new)
        outputs.append(layer.attend(AttentionCall(query)))
    return torch.cat(outputs)


@pytest.mark.parametrize("num_tokens", [16 * 1024, pytest.param(128 * 1024, marks=pytest.mark.long)])
def test_little_of_a_layer_is_resident(tmp_path, monkeypatch, num_tokens):
    """A layer of an 8B Llama: 8 heads of 128, in bfloat16."""
    keys, values = torch.randn(2, 1, 8, num_tokens, 128, dtype=torch.bfloat16)
    queries = torch.randn(4, 1, 32, 1, 128, dtype=torch.bfloat16)
    resident, advise = [], mapped_files.advise

    calls = count()

    def note_and_advise(*arguments):
        # Of some heads and pages: to look takes longer than a step
        if next(calls) % 13 == 0:
            resident.append(resident_bytes(tmp_path))
        advise(*arguments)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    def note_compiled(*arguments):
        note_and_advise(*arguments)
        return 0

    # It is never more than before something is let go of
    monkeypatch.setattr(mapped_files, "advise", note_and_advise)
    monkeypatch.setattr(tokens, "address_of_advise", lambda: ctypes.cast(note_compiled, ctypes.c_void_p).value)
    with torch.no_grad():
        expected = decode_states(None, keys, values, queries)
        found = decode_states(tmp_path, keys, values, queries)
    assert torch.equal(found, expected)
    pool_bytes = (num_tokens - 32) * 8 * 256 * 2
    # Writing, then each head of each page in each of four steps
    assert len(resident) > 4 * 8 * num_tokens // 1024 // 13
    assert 0 < max(resident) <= pool_bytes / 10
    assert resident_bytes(tmp_path) == 0


@pytest.fixture
def forget(monkeypatch):
    """Has the system forget all pages that were made, which are on the disk then."""
    descriptors, make = [], tempfile.TemporaryFile

    def note_and_make(**options):
        file = make(**options)
        descriptors.append(os.dup(file.fileno()))
        return file

    def forget_pages(pages):
        for page in pages:
            mapped_files.release(page)
        for descriptor in descriptors:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    monkeypatch.setattr(tempfile, "TemporaryFile", note_and_make)
    yield forget_pages
    for descriptor in descriptors:
        os.close(descriptor)


def test_what_is_expected_is_what_rows_lie_in(tmp_path, monkeypatch):
    asked = []
    disk = DiskPages(tmp_path)
    pages = [disk.new_page((1, 2, 1024, 256), torch.float32) for _ in range(2)]
    monkeypatch.setattr(disk_pages, "advise", lambda *args: asked.append(args))
    monkeypatch.setattr(disk_pages, "cached_blocks", lambda page: torch.zeros(num_blocks(page), dtype=torch.bool))
    slots, count = torch.tensor([[[0, 20, 1500], [3, 3, 9]]]), torch.tensor([[3, 1]])
    disk.expect(pages, slots, count)
    assert asked == []
    disk.has_waited = True
    disk.expect(pages, slots, count)
    first, second = (page.data_ptr() for page in pages)
    size, head = mmap.PAGESIZE, 1024 * 1024
    wanted = [first, first + 5 * size, first + head, second + 476 * 1024 // size * size]
    assert asked == [(address, size, mmap.MADV_WILLNEED) for address in wanted]
    asked.clear()
    disk.expect_page(pages[0])
    assert asked == [(first + part * 32 * size, 32 * size, mmap.MADV_WILLNEED) for part in range(16)]
    monkeypatch.setattr(disk_pages, "cached_blocks", lambda page: torch.ones(num_blocks(page), dtype=torch.bool))
    disk.expect(pages, slots, count)
    assert not disk.has_waited


@pytest.mark.parametrize("row_dim", [1, 9, 128, 2000])
def test_blocks_that_rows_lie_in(row_dim):
    pages = [torch.zeros(2, 3, 64, row_dim) for _ in range(2)]
    slots, count = torch.stack([torch.randperm(128)[:20] for _ in range(6)]).view(2, 3, 20), torch.full((2, 3), 7)
    expected = torch.zeros(2, -(-pages[0].nbytes // mmap.PAGESIZE), dtype=torch.bool)
    for head, own in enumerate(slots[:, :, :7].flatten(0, 1).tolist()):
        for slot in own:
            start = (head * 64 + slot % 64) * row_dim * 4
            expected[slot // 64, start // mmap.PAGESIZE : (start + row_dim * 4 - 1) // mmap.PAGESIZE + 1] = True
    assert torch.equal(disk_pages._wanted_blocks(pages, slots, count), expected)


def test_what_is_missing_is_read_ahead(tmp_path, forget, wait_until):
    disk = DiskPages(tmp_path)
    pages = [disk.new_page((1, 1, 1024, 1024), torch.float32) for _ in range(2)]
    for page in pages:
        page.fill_(3)
    forget(pages)
    if all(cached_blocks(page).all() for page in pages):
        pytest.skip("the file system keeps its files in memory")
    slots = torch.tensor([[[5, 900, 1030]]])
    with disk.reading():
        assert torch.equal(gather_rows(pages, slots, are_mapped=True), torch.full((1, 1, 3, 1024), 3.0))
    assert disk.has_waited
    forget(pages)
    disk.expect(pages, slots, torch.tensor([[3]]))
    # The system reads in its own time
    wait_until(lambda: [cached_blocks(page).nonzero().flatten().tolist() for page in pages] == [[5, 900], [6]])


def test_a_full_disk_is_an_error_and_nothing_is_lost(tiny_llama, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = InfiniGenCache(tiny_llama, pool_folder=tmp_path, **OPTIONS)
    with torch.no_grad():
        tiny_llama(torch.randint(3, 128, (1, 60)), past_key_values=cache)
    length = cache.get_seq_length()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match="no memory for"), torch.no_grad():
        for _ in range(100):
            tiny_llama(torch.randint(3, 128, (1, 1)), past_key_values=cache)
    assert cache.layers[1].pool.num_slots >= length - 40
