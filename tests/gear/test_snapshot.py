"""A saved cache goes on exactly where it was; files that do not fit are refused and harm nothing."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvcache_plugins import GEARCache, create_cache


def filled(model, name="gear-2bit", **options):
    cache = create_cache(name, model, **options)
    input_ids = torch.randint(3, 128, (2, 150))
    mask = torch.ones_like(input_ids)
    mask[1, :40] = 0
    tokens = model.generate(input_ids, attention_mask=mask, past_key_values=cache, max_new_tokens=100, do_sample=False)
    return cache, tokens, torch.cat([mask, torch.ones(2, 100, dtype=mask.dtype)], dim=1)


@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
@pytest.mark.parametrize("name", ["gear-4bit", "gear-2bit", "gear-l-2bit", "kivi-2bit", "per-token-2bit"])
def test_goes_on_exactly_where_it_was(tiny_model, tmp_path, architecture, name):
    model = tiny_model(architecture)
    cache, tokens, mask = filled(model, name)
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = GEARCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.gear_config == cache.gear_config
    assert loaded.stats() == cache.stats()
    options = {"attention_mask": mask, "max_new_tokens": 80, "do_sample": False}
    assert torch.equal(
        model.generate(tokens, past_key_values=loaded, **options),
        model.generate(tokens, past_key_values=cache, **options),
    )
    assert loaded.stats() == cache.stats()


def test_file_is_as_small_as_the_cache(tiny_llama, tmp_path):
    cache, *_ = filled(tiny_llama)
    cache.save(tmp_path / "cache.safetensors", tiny_llama)
    assert (tmp_path / "cache.safetensors").stat().st_size < cache.memory().total_bytes + 20_000


def test_made_without_config_and_empty(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = GEARCache(nbits=3)
    tiny_llama(torch.randint(3, 128, (1, 100)), past_key_values=cache)
    cache.save(path, tiny_llama)
    assert GEARCache.load(path, tiny_llama).get_seq_length() == 100
    GEARCache(tiny_llama.config).save(path, tiny_llama)
    assert GEARCache.load(path, tiny_llama).get_seq_length() == 0


def test_cropped_to_nothing(tiny_llama, tmp_path):
    path, cache = tmp_path / "cache.safetensors", GEARCache(tiny_llama.config)
    tiny_llama(torch.randint(3, 128, (2, 100)), past_key_values=cache)
    cache.crop(-100)
    cache.save(path, tiny_llama)
    loaded, tokens = GEARCache.load(path, tiny_llama), torch.randint(3, 128, (1, 90))
    assert loaded.get_seq_length() == 0
    logits, expected = (tiny_llama(tokens, past_key_values=each).logits for each in (loaded, cache))
    assert torch.equal(logits, expected)


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


@pytest.mark.parametrize("size", [0, 100, 0.5, 0.999])
def test_truncated_file_is_refused(tiny_llama, tmp_path, size):
    path = tmp_path / "cache.safetensors"
    filled(tiny_llama)[0].save(path, tiny_llama)
    content = path.read_bytes()
    path.write_bytes(content[: int(size * len(content)) if isinstance(size, float) else size])
    with pytest.raises(ValueError, match="damaged"):
        GEARCache.load(path, tiny_llama)


def test_other_files_and_versions_are_refused(tiny_llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    with pytest.raises(ValueError, match="no file"):
        GEARCache.load(path, tiny_llama)
    save_file({"x": torch.zeros(1)}, str(path))
    with pytest.raises(ValueError, match="not one that `save`"):
        GEARCache.load(path, tiny_llama)
    filled(tiny_llama)[0].save(path, tiny_llama)
    with safe_open(str(path), framework="pt") as file:
        document = json.loads(file.metadata()["kvcache_plugins"])
    document["version"] = 1
    save_file(load_file(str(path)), str(path), metadata={"kvcache_plugins": json.dumps(document)})
    with pytest.raises(ValueError, match="version 1.*version 3"):
        GEARCache.load(path, tiny_llama)
