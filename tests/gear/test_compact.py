"""Caches saved with `compact=True`: fewer bytes, and the same cache when they are loaded."""

import pytest
import torch

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.files.records import read_record, write_record
from kvcache_plugins.files.schema import pack
from kvcache_plugins.gear import calibrate_transform
from kvcache_plugins.gear.snapshot import FORMAT, Snapshot, state_of


def words(*shape):
    """Text of few words, as texts are."""
    return torch.randint(3, 128, shape).clamp(max=40)


def filled(model, name, **options):
    """Caches two sequences, one padded on its left, and decodes tokens behind them."""
    cache, ids = create_cache(name, model, **options), words(2, 300)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        for _ in range(80):
            mask = torch.cat([mask, mask[:, -1:]], dim=1)
            model(words(2, 1), attention_mask=mask, past_key_values=cache)
    return cache, mask


def require_same(model, cache, loaded, mask):
    for one, other in zip(cache.layers, loaded.layers, strict=True):
        (document, tensors), (found, same) = pack(state_of(one, 0)), pack(state_of(other, 0))
        assert document == found and tensors.keys() == same.keys()
        assert all(torch.equal(tensors[name], same[name]) for name in tensors)
    ids = words(2, 3)
    mask = torch.cat([mask, mask[:, -1:].expand(-1, 3)], dim=1)
    with torch.no_grad():
        logits = [model(ids, attention_mask=mask, past_key_values=each).logits for each in (cache, loaded)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["gear", "gear-t22", "gear-c16", "gear-k4v3", "gear-t25:quantizer=trellis"])
def test_loaded_is_the_cache_that_was_saved(tiny_llama, tmp_path, name):
    options, path = {}, tmp_path / "cache.safetensors"
    if name == "gear-c16":
        options["calibration"] = calibrate_transform(tiny_llama, [words(400)])
    cache, mask = filled(tiny_llama, name, **options)
    cache.save(path, tiny_llama)
    size = path.stat().st_size
    cache.save(path, tiny_llama, compact=True)
    # Groups and trellises are written as ever
    assert (path.stat().st_size < size) == (name in ("gear", "gear-t22", "gear-c16"))
    loaded = GEARCache.load(path, tiny_llama, **options)
    require_same(tiny_llama, cache, loaded, mask)
    for each in (cache, loaded):
        each.crop(-150)
    require_same(tiny_llama, cache, loaded, mask[:, :233])


@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "qwen3"])
def test_layers_of_every_kind_and_none(tiny_model, tmp_path, architecture):
    model, path = tiny_model(architecture), tmp_path / "cache.safetensors"
    cache, mask = filled(model, "gear")
    cache.save(path, model, compact=True)
    require_same(model, cache, GEARCache.load(path, model), mask)
    GEARCache(model.config).save(path, model, compact=True)
    assert GEARCache.load(path, model).get_seq_length() == 0


def test_loaded_in_inference_mode_it_goes_on_outside(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache, mask = filled(tiny_llama, "gear")
    cache.save(path, tiny_llama, compact=True)
    with torch.inference_mode():
        loaded = GEARCache.load(path, tiny_llama)
    assert not loaded.layers[0].blocks[0].keys.is_inference()
    require_same(tiny_llama, cache, loaded, mask)


def forged(path, change):
    """Writes a file anew, with its checksum, with something else in a layer's block."""
    record = read_record(path, FORMAT, Snapshot)
    change(record.layers[1].blocks[0])
    write_record(path, FORMAT, record)


def cut(block):
    block.keys["stream0"] = block.keys["stream0"][:-5]


def swap(block):
    block.keys["stream0"], block.values["stream0"] = block.values["stream0"], block.keys["stream0"]


def lose(block):
    del block.values["stream1"]


def add(block):
    block.values["stream2"] = block.values["stream1"]


def retype(block):
    block.keys["stream1"] = block.keys["stream1"].float()


def lengthen(block):
    object.__setattr__(block, "length", 2**35)


@pytest.mark.parametrize("change", [cut, swap, lose, add, retype, lengthen])
def test_forged_streams_are_refused(tiny_llama, tmp_path, change):
    path = tmp_path / "cache.safetensors"
    filled(tiny_llama, "gear")[0].save(path, tiny_llama, compact=True)
    forged(path, change)
    with pytest.raises(ValueError, match="`path`: .* is damaged: .*layers.1.blocks.0"):
        GEARCache.load(path, tiny_llama)


def test_cut_files_are_refused(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    filled(tiny_llama, "gear")[0].save(path, tiny_llama, compact=True)
    content = path.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="damaged"):
            GEARCache.load(path, tiny_llama)
