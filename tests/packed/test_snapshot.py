"""A saved cache continues exactly where it was; files that do not fit are refused and harm nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcache_plugins import GEARCache, TransformCodingCache, create_cache
from kvcache_plugins.files.records import read_record, write_record
from kvcache_plugins.files.schema import pack
from kvcache_plugins.packed.snapshot import state_of
from kvcache_plugins.transform_coding import calibrate_transform
from kvcache_plugins.transform_coding.cache import TransformCodingSnapshot


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


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
    """Requires that both caches hold the same, and go on alike."""
    for one, other in zip(cache.layers, loaded.layers, strict=True):
        (document, tensors), (found, same) = pack(state_of(one, 0)), pack(state_of(other, 0))
        assert document == found and tensors.keys() == same.keys()
        assert all(torch.equal(tensors[name], same[name]) for name in tensors)
    ids, mask = words(2, 3), torch.cat([mask, mask[:, -1:].expand(-1, 3)], dim=1)
    with torch.no_grad():
        logits = [model(ids, attention_mask=mask, past_key_values=each).logits for each in (cache, loaded)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["gear-2bit", "transform-22"])
@pytest.mark.parametrize("length", [20, 152])
def test_a_file_loaded_in_inference_mode_continues_in_any(tiny_llama, path, name, length):
    ids = torch.randint(3, 128, (1, length + 90))
    cache = create_cache(name, tiny_llama)
    with torch.no_grad():
        for part in (ids[:, : length - 2], ids[:, length - 2 : length]):
            tiny_llama(part, past_key_values=cache)
        cache.save(path, tiny_llama)
    with torch.inference_mode():
        loaded = type(cache).load(path, tiny_llama)
    assert not any(tensor.is_inference() for layer in loaded.layers for _, tensor in layer.named_tensors())
    for number in range(length, length + 90):
        token = ids[:, number : number + 1]
        with (torch.inference_mode, torch.no_grad)[number % 2]():
            logits = tiny_llama(token, past_key_values=loaded).logits
        with torch.no_grad():
            assert torch.equal(logits, tiny_llama(token, past_key_values=cache).logits)


@pytest.mark.parametrize("name", ["gear-2bit", "transform-22"])
def test_file_is_as_small_as_the_cache(tiny_llama, path, name):
    cache, _ = filled(tiny_llama, name)
    cache.save(path, tiny_llama)
    assert path.stat().st_size < cache.memory().total_bytes + 20_000


@pytest.mark.parametrize("make", [GEARCache, TransformCodingCache])
def test_caches_without_config_and_empty_ones_are_saved(tiny_llama, path, make):
    cache = make(nbits=3)
    tiny_llama(torch.randint(3, 128, (1, 100)), past_key_values=cache)
    cache.save(path, tiny_llama)
    assert make.load(path, tiny_llama).get_seq_length() == 100
    make(tiny_llama.config).save(path, tiny_llama)
    assert make.load(path, tiny_llama).get_seq_length() == 0


def test_another_model_is_refused(tiny_model, path):
    model = tiny_model("llama")
    filled(model, "gear-2bit")[0].save(path, model)
    for other in (tiny_model("llama", num_hidden_layers=3), tiny_model("qwen3"), tiny_model("llama").bfloat16()):
        with pytest.raises(ValueError, match="another model"):
            GEARCache.load(path, other)
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight *= 1.1
    with pytest.raises(ValueError, match="another model"):
        GEARCache.load(path, other)


@pytest.mark.parametrize("name", ["gear-2bit", "transform"])
def test_truncated_file_is_refused(tiny_llama, path, name):
    cache = filled(tiny_llama, name)[0]
    cache.save(path, tiny_llama)
    content = path.read_bytes()
    for size in (0, 100, len(content) // 2, int(0.999 * len(content)), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="damaged"):
            type(cache).load(path, tiny_llama)


def test_other_files_and_versions_are_refused(tiny_llama, path):
    with pytest.raises(ValueError, match=f"`path`: there is no file {path}"):
        GEARCache.load(path, tiny_llama)
    save_file({"x": torch.zeros(1)}, str(path))
    with pytest.raises(ValueError, match="none that this package wrote"):
        GEARCache.load(path, tiny_llama)
    # Version 3 had no checksum; version 7 was of one class for both methods
    for version in (3, 7):
        document = {"format": "kvcache_plugins.gear", "version": version, "model": ""}
        save_file({"x": torch.zeros(1)}, str(path), metadata={"kvcache_plugins": json.dumps(document)})
        for own, only in ((GEARCache, "gear' version 8"), (TransformCodingCache, "transform_coding' version 1")):
            message = f"{path} holds format 'kvcache_plugins.gear' version {version}, but only .*{only}.*`save` anew"
            with pytest.raises(ValueError, match=message):
                own.load(path, tiny_llama)


def test_a_file_of_the_other_class_is_refused(tiny_llama, path):
    filled(tiny_llama, "transform")[0].save(path, tiny_llama)
    with pytest.raises(ValueError, match="holds format 'kvcache_plugins.transform_coding'.*the class that saved it"):
        GEARCache.load(path, tiny_llama)


def test_rows_of_trellis_codes_are_refused(tiny_llama, path):
    """Versions that had this quantizer wrote such files."""
    filled(tiny_llama, "transform")[0].save(path, tiny_llama)
    form = TransformCodingCache._format
    record = read_record(path, form, TransformCodingSnapshot)
    assert record.config.quantizer == "lloyd-max"
    object.__setattr__(record.config, "quantizer", "trellis")
    write_record(path, form, record)
    with pytest.raises(ValueError, match=f"`path`: {path} holds trellis codes, which only earlier versions read: pre"):
        TransformCodingCache.load(path, tiny_llama)


def test_file_is_one_of_safetensors(tiny_llama, path):
    cache, _ = filled(tiny_llama, "gear-2bit")
    cache.save(path, tiny_llama)
    stored = load_file(str(path))
    block = cache.layers[1].storage.segments[0]
    assert torch.equal(stored["layers.1.blocks.0.keys.codes"], block.keys.codes)
    assert len(stored) == sum(1 for layer in cache.layers for _ in layer.named_tensors() if _[0] != "spare")


def test_loaded_cache_does_not_depend_on_its_file(tiny_llama, path):
    cache, mask = filled(tiny_llama, "gear-2bit")
    cache.save(path, tiny_llama)
    loaded = GEARCache.load(path, tiny_llama)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    require_same(tiny_llama, cache, loaded, mask)


def test_config_is_taken_where_a_model_is(tiny_model, path):
    model = tiny_model("llama")
    cache, mask = filled(model, "gear-2bit")
    cache.save(path, model)
    loaded = GEARCache.load(path, model.config)
    require_same(model, cache, loaded, mask)
    for other in (tiny_model("llama", num_hidden_layers=3), tiny_model("llama-mha"), tiny_model("qwen3")):
        with pytest.raises(ValueError, match=f"`path`: {path} was made by another model"):
            GEARCache.load(path, other.config)
    with pytest.raises(ValueError, match="`model` must be a `PreTrainedModel`"):
        GEARCache.load(path, "smollm2")


def test_sliding_layers_save_only_their_window(tiny_model, path):
    """While a rollback may follow they keep more than the window, which a file does not."""
    model = tiny_model("gemma3-hybrid")
    cache = GEARCache(model.config)
    with torch.no_grad():
        for layer in cache.layers:
            if layer.is_sliding:
                layer.activate_past_recording()
        model(torch.randint(3, 128, (1, 100)), past_key_values=cache)
        cache.save(path, model)
        loaded = GEARCache.load(path, model)
        assert loaded.layers[0].keys.shape[2] == 31 < cache.layers[0].keys.shape[2]
        next_ids = torch.randint(3, 128, (1, 1))
        difference = model(next_ids, past_key_values=loaded).logits - model(next_ids, past_key_values=cache).logits
    assert difference.abs().max() < 1e-5


def test_cropped_and_reordered_caches_can_be_saved(tiny_llama, path):
    """Saves caches that no single prompt makes: cut into the padding of an item, into a block, down to nothing."""
    input_ids = torch.randint(3, 128, (2, 150))
    mask = torch.ones_like(input_ids)
    mask[1, :40] = 0
    next_ids = torch.randint(3, 128, (1, 3))
    for name in ("gear-4bit", "gear-k4v3", "kivi-2bit", "transform-22"):
        for count in (170, 100, 30, 3, 0):
            cache = create_cache(name, tiny_llama, residual_length=16)
            with torch.no_grad():
                tiny_llama(input_ids, attention_mask=mask, past_key_values=cache)
                for _ in range(5):
                    tiny_llama(torch.randint(3, 128, (2, 10)), past_key_values=cache)
                before = cache.stats()["tokens_compressed"]
                cache.crop(count - 200)
                # It still counts what it did
                assert cache.stats()["tokens_compressed"] == before > 0
                cache.batch_select_indices(torch.tensor([0, 1, 0]))
                cache.save(path, tiny_llama)
                loaded = type(cache).load(path, tiny_llama)
                assert loaded.stats() == cache.stats() | {"dense_reads": 0} and loaded.get_seq_length() == count
                following = next_ids.expand(3 if count else 2, -1)
                expected = tiny_llama(following, past_key_values=cache).logits
                assert torch.equal(tiny_llama(following, past_key_values=loaded).logits, expected)


@pytest.mark.parametrize("name", ["transform", "transform-22", "calibrated-16", "gear-k4v3"])
def test_loaded_is_the_cache_that_was_saved(tiny_llama, path, name):
    options = {}
    if name == "calibrated-16":
        options["calibration"] = calibrate_transform(tiny_llama, [words(400)])
    cache, mask = filled(tiny_llama, name, **options)
    cache.save(path, tiny_llama)
    loaded = type(cache).load(path, tiny_llama, **options)
    require_same(tiny_llama, cache, loaded, mask)
    for each in (cache, loaded):
        each.crop(-150)
    require_same(tiny_llama, cache, loaded, mask[:, :233])


@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "qwen3"])
def test_layers_of_every_kind_are_saved(tiny_model, path, architecture):
    model = tiny_model(architecture)
    cache, mask = filled(model, "transform")
    cache.save(path, model)
    require_same(model, cache, type(cache).load(path, model), mask)
    TransformCodingCache(model.config).save(path, model)
    assert TransformCodingCache.load(path, model).get_seq_length() == 0


# Changes of a layer's block
FORGED = {
    "cut": lambda block: block.keys.update(rows=block.keys["rows"][:, :, :-1]),
    "lost": lambda block: block.values.pop("rows"),
    "added": lambda block: block.values.update(more=block.values["rows"]),
    "of another dtype": lambda block: block.keys.update(rows=block.keys["rows"].float()),
    "lengthened": lambda block: object.__setattr__(block, "length", 2**35),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_forged_blocks_are_refused(tiny_llama, path, forge):
    filled(tiny_llama, "transform")[0].save(path, tiny_llama)
    form = TransformCodingCache._format
    record = read_record(path, form, TransformCodingSnapshot)
    forge(record.layers[1].blocks[0])
    # With its checksum
    write_record(path, form, record)
    with pytest.raises(ValueError, match="`path`: .* is damaged: .*layers.1"):
        TransformCodingCache.load(path, tiny_llama)
