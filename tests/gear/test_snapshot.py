"""A saved cache goes on exactly where it was; files that do not fit are refused and harm nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.contract.subject import RECORDS_PAST


def filled(model, name="gear-2bit", **options):
    cache = create_cache(name, model, **options)
    input_ids = torch.randint(3, 128, (2, 150))
    mask = torch.ones_like(input_ids)
    mask[1, :40] = 0
    tokens = model.generate(input_ids, attention_mask=mask, past_key_values=cache, max_new_tokens=100, do_sample=False)
    return cache, tokens, torch.cat([mask, torch.ones(2, 100, dtype=mask.dtype)], dim=1)


def require_same_tokens(model, cache, loaded, tokens, mask, num_tokens=5):
    """Requires that both caches go on alike."""
    options = {"attention_mask": mask, "max_new_tokens": num_tokens, "do_sample": False}
    found, expected = (model.generate(tokens, past_key_values=each, **options) for each in (loaded, cache))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gear-4bit", "gear-t16"])
def test_goes_on_exactly_where_it_was(tiny_model, tmp_path, name):
    """Saves layers of Transformers' own beside compressed ones; caches of full attention alone: `tests/contract`."""
    model = tiny_model("gemma3-hybrid")
    cache, tokens, mask = filled(model, name)
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = GEARCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.gear_config == cache.gear_config
    assert loaded.stats() == cache.stats()
    require_same_tokens(model, cache, loaded, tokens, mask, 80)
    assert loaded.stats() == cache.stats()


@pytest.mark.parametrize("name", ["gear-2bit", "gear-t22"])
@pytest.mark.parametrize("length", [20, 152])
def test_loaded_in_inference_mode_it_goes_on_in_any(tiny_llama, tmp_path, name, length):
    path, ids = tmp_path / "cache.safetensors", torch.randint(3, 128, (1, length + 90))
    cache = create_cache(name, tiny_llama)
    with torch.no_grad():
        for part in (ids[:, : length - 2], ids[:, length - 2 : length]):
            tiny_llama(part, past_key_values=cache)
        cache.save(path, tiny_llama)
    with torch.inference_mode():
        loaded = GEARCache.load(path, tiny_llama)
    for number in range(length, length + 90):
        token = ids[:, number : number + 1]
        with (torch.inference_mode, torch.no_grad)[number % 2]():
            logits = tiny_llama(token, past_key_values=loaded).logits
        with torch.no_grad():
            assert torch.equal(logits, tiny_llama(token, past_key_values=cache).logits)


@pytest.mark.parametrize("name", ["gear-2bit", "gear-t22"])
def test_file_is_as_small_as_the_cache(tiny_llama, tmp_path, name):
    cache, *_ = filled(tiny_llama, name)
    cache.save(tmp_path / "cache.safetensors", tiny_llama)
    assert (tmp_path / "cache.safetensors").stat().st_size < cache.memory().total_bytes + 20_000


@pytest.mark.parametrize("backbone", [None, "transform"])
def test_made_without_config_and_empty(tiny_llama, tmp_path, backbone):
    path = tmp_path / "cache.safetensors"
    cache = GEARCache(nbits=3, backbone=backbone)
    tiny_llama(torch.randint(3, 128, (1, 100)), past_key_values=cache)
    cache.save(path, tiny_llama)
    assert GEARCache.load(path, tiny_llama).get_seq_length() == 100
    GEARCache(tiny_llama.config).save(path, tiny_llama)
    assert GEARCache.load(path, tiny_llama).get_seq_length() == 0


def test_another_model_is_refused(tiny_model, tmp_path):
    model, path = tiny_model("llama"), tmp_path / "cache.safetensors"
    filled(model)[0].save(path, model)
    for other in (tiny_model("llama", num_hidden_layers=3), tiny_model("qwen3"), tiny_model("llama").bfloat16()):
        with pytest.raises(ValueError, match="another model"):
            GEARCache.load(path, other)
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight *= 1.1
    with pytest.raises(ValueError, match="another model"):
        GEARCache.load(path, other)


def test_truncated_file_is_refused(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    filled(tiny_llama)[0].save(path, tiny_llama)
    content = path.read_bytes()
    for size in (0, 100, len(content) // 2, int(0.999 * len(content))):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="damaged"):
            GEARCache.load(path, tiny_llama)


def test_other_files_and_versions_are_refused(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    with pytest.raises(ValueError, match=f"`path`: there is no file {path}"):
        GEARCache.load(path, tiny_llama)
    save_file({"x": torch.zeros(1)}, str(path))
    with pytest.raises(ValueError, match="none that this package wrote"):
        GEARCache.load(path, tiny_llama)
    # As version 3 was, without a checksum
    document = {"format": "kvcache_plugins.gear", "version": 3, "model": ""}
    save_file({"x": torch.zeros(1)}, str(path), metadata={"kvcache_plugins": json.dumps(document)})
    with pytest.raises(ValueError, match=f"{path} holds .* version 3, but only .* version 7.*`save` anew"):
        GEARCache.load(path, tiny_llama)


def test_file_is_one_of_safetensors(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache, *_ = filled(tiny_llama)
    cache.save(path, tiny_llama)
    stored = load_file(str(path))
    block = cache.layers[1].blocks[0]
    assert torch.equal(stored["layers.1.blocks.0.keys.codes"], block.keys.codes)
    assert len(stored) == sum(1 for layer in cache.layers for _ in layer.named_tensors() if _[0] != "spare")


def test_loaded_cache_does_not_depend_on_its_file(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache, tokens, mask = filled(tiny_llama)
    cache.save(path, tiny_llama)
    loaded = GEARCache.load(path, tiny_llama)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    require_same_tokens(tiny_llama, cache, loaded, tokens, mask)


def test_config_is_taken_where_a_model_is(tiny_model, tmp_path):
    model, path = tiny_model("llama"), tmp_path / "cache.safetensors"
    cache, tokens, mask = filled(model)
    cache.save(path, model)
    loaded = GEARCache.load(path, model.config)
    require_same_tokens(model, cache, loaded, tokens, mask)
    for other in (tiny_model("llama", num_hidden_layers=3), tiny_model("llama-mha"), tiny_model("qwen3")):
        with pytest.raises(ValueError, match=f"`path`: {path} was made by another model"):
            GEARCache.load(path, other.config)
    with pytest.raises(ValueError, match="`model` must be a `PreTrainedModel`"):
        GEARCache.load(path, "smollm2")


@pytest.mark.skipif(not RECORDS_PAST, reason="in this release of Transformers layers keep their window alone")
def test_sliding_layers_beyond_their_window(tiny_model, tmp_path):
    """While a rollback may follow they keep more than the window, which a file does not."""
    model, path = tiny_model("gemma3-hybrid"), tmp_path / "cache.safetensors"
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


def test_what_crop_and_batch_operations_leave_can_be_saved(tiny_llama, tmp_path):
    """Saves caches that no single prompt makes: cut into the padding of an item, into a block, down to nothing."""
    path = tmp_path / "cache.safetensors"
    input_ids = torch.randint(3, 128, (2, 150))
    mask = torch.ones_like(input_ids)
    mask[1, :40] = 0
    next_ids = torch.randint(3, 128, (1, 3))
    for name in ("gear-4bit", "gear-k4v3", "kivi-2bit", "gear-t22"):
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
                loaded = GEARCache.load(path, tiny_llama)
                assert loaded.stats() == cache.stats() | {"dense_reads": 0} and loaded.get_seq_length() == count
                following = next_ids.expand(3 if count else 2, -1)
                expected = tiny_llama(following, past_key_values=cache).logits
                assert torch.equal(tiny_llama(following, past_key_values=loaded).logits, expected)
