"""A pool on disk is the pool in memory, bit for bit; its files have no names, and little of it is resident."""

import copy
import errno
import gc
import mmap
import os

import pytest
import torch

from kvcache_plugins import InfiniGenCache, InfiniGenGEARCache
from kvcache_plugins.infinigen import disk_pages
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.disk_pages import DiskPages
from kvcache_plugins.infinigen.layer import InfiniGenLayer


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


@pytest.mark.parametrize("cache_class", [InfiniGenCache, InfiniGenGEARCache])
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
        outputs.append(layer.attend(query, None, is_causal=False, scale=None))
    return torch.cat(outputs)


@pytest.mark.parametrize("num_tokens", [16 * 1024, pytest.param(128 * 1024, marks=pytest.mark.long)])
def test_little_of_a_layer_is_resident(tmp_path, monkeypatch, num_tokens):
    """A layer of an 8B Llama: 8 heads of 128, in bfloat16."""
    keys, values = torch.randn(2, 1, 8, num_tokens, 128, dtype=torch.bfloat16)
    queries = torch.randn(4, 1, 32, 1, 128, dtype=torch.bfloat16)
    resident, release = [], DiskPages.release

    def note_and_release(self, page):
        resident.append(resident_bytes(tmp_path))
        release(self, page)

    # It is never more than before something is let go of
    monkeypatch.setattr(DiskPages, "release", note_and_release)
    with torch.no_grad():
        expected = decode_states(None, keys, values, queries)
        found = decode_states(tmp_path, keys, values, queries)
    assert torch.equal(found, expected)
    pool_bytes = (num_tokens - 32) * 8 * 256 * 2
    assert len(resident) > 4 * num_tokens // 1024
    assert 0 < max(resident) <= pool_bytes / 10


def test_what_is_expected_is_what_rows_lie_in(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(disk_pages, "_advise", lambda *args: asked.append(args))
    disk = DiskPages(tmp_path)
    pages = [disk.new_page((1, 2, 1024, 256), torch.float32) for _ in range(2)]
    slots, count = torch.tensor([[[0, 4, 1500], [3, 3, 9]]]), torch.tensor([[3, 1]])
    disk.expect(pages, slots, count)
    first, second = (page.data_ptr() for page in pages)
    size, head = mmap.PAGESIZE, 1024 * 1024
    wanted = {(first, size), (first + size, size), (first + head, size), (second + 476 * 1024 // size * size, size)}
    merged = {(first, 2 * size), *wanted} - {(first, size), (first + size, size)}
    assert {each[:2] for each in asked if each[2] == mmap.MADV_WILLNEED} == merged


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


@pytest.mark.parametrize("folder", ["missing", 3])
def test_folders_that_are_none_are_refused(tiny_llama, folder):
    with pytest.raises(ValueError, match="`pool_folder`"):
        InfiniGenCache(tiny_llama, pool_folder=folder)
