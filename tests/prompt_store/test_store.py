"""A cache from the store is the one that reading its prompt in the same blocks makes, and prompts share what they have
in common."""

import pytest
import torch

from kvcache_plugins import GEARCache, PromptStore, create_cache


# Rows and groups, without and with low rank and outliers; the others differ from these in bits
DAILY = [("llama", "gear"), ("llama", "gear-4bit"), ("llama", "kivi-2bit"), ("gemma3-hybrid", "gear-2bit")]
NAMES = ("gear", "gear-4bit", "gear-2bit", "kivi-2bit", "per-token-2bit", "gear-k4v3", "gear-t16", "gear-t30")
OTHERS = [(architecture, name) for architecture in ("llama", "gemma3-hybrid") for name in NAMES]


def prompt(num_tokens: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, num_tokens))


def generate(model, input_ids, cache, **options):
    return model.generate(input_ids, past_key_values=cache, max_new_tokens=80, do_sample=False, **options)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [*DAILY, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS if case not in DAILY)],
)
def test_equals_reading_in_blocks(tiny_model, tmp_path, assert_same, read_in_blocks, architecture, name):
    model, input_ids = tiny_model(architecture), prompt(900)
    PromptStore(tmp_path).read(model, input_ids, name)
    store = PromptStore(tmp_path)
    loaded = store.cache_for(model, input_ids, name)
    assert loaded.get_seq_length() == 768 and store.stats()["tokens_saved"] == 768
    assert_same(loaded, read_in_blocks(model, input_ids[:, :768], create_cache(name, model)))
    expected = read_in_blocks(model, input_ids[:, :768], create_cache(name, model))
    assert torch.equal(generate(model, input_ids, loaded), generate(model, input_ids, expected))
    assert_same(loaded, expected)


def test_prompts_share_what_they_have_in_common(tiny_llama, tmp_path, assert_same, read_in_blocks):
    first = prompt(1100)
    # Unlike from the last token of a block on
    second = torch.cat([first[:, :767], prompt(333)], dim=1)
    store = PromptStore(tmp_path)
    store.read(tiny_llama, first)
    assert store.stats()["blocks_kept"] == 4
    cache = store.read(tiny_llama, second)
    assert store.stats()["blocks_kept"] == 6 and store.stats()["tokens_saved"] == 512
    assert len(list(tmp_path.glob("blocks/*/*.safetensors"))) == 6
    assert_same(cache, read_in_blocks(tiny_llama, second, create_cache("gear", tiny_llama)))


@pytest.mark.parametrize("name", ["gear", "gear-k4v3"])
def test_compact_blocks_are_the_same_and_read_beside_others(tiny_llama, tmp_path, assert_same, name):
    input_ids = prompt(1100)
    plain = PromptStore(tmp_path / "plain")
    expected = plain.read(tiny_llama, input_ids, name)
    store = PromptStore(tmp_path / "compact", compact=True)
    store.read(tiny_llama, input_ids, name)
    is_smaller = store.stats()["bytes_kept"] < plain.stats()["bytes_kept"]
    assert is_smaller == (name == "gear")
    again = PromptStore(tmp_path / "compact")
    assert_same(again.read(tiny_llama, input_ids, name), expected)
    assert again.stats()["tokens_saved"] == 1024
    # Of another prompt's: what follows a compact block is written as this store does
    other = torch.cat([input_ids[:, :800], prompt(300)], dim=1)
    mixed = again.read(tiny_llama, other, name)
    assert again.stats()["blocks_kept"] == 1
    assert_same(PromptStore(tmp_path / "compact").read(tiny_llama, other, name), mixed)


def test_kept_after_generation_in_chunks(tiny_llama, tmp_path):
    input_ids, store = prompt(600), PromptStore(tmp_path)
    cache = store.cache_for(tiny_llama, input_ids, "gear-t22")
    tokens = generate(tiny_llama, input_ids, cache, prefill_chunk_size=cache.record.length)
    assert store.keep(cache, tokens) == 2 and store.keep(cache, tokens) == 0
    again = PromptStore(tmp_path).cache_for(tiny_llama, input_ids, "gear-t22")
    assert again.get_seq_length() == 512
    assert torch.equal(generate(tiny_llama, input_ids, again), tokens)


@pytest.mark.parametrize("name", ["gear", "gear-t22"])
def test_fed_in_one_go_is_not_kept(tiny_llama, tmp_path, name):
    input_ids, store = prompt(600), PromptStore(tmp_path)
    cache = store.cache_for(tiny_llama, input_ids, name)
    generate(tiny_llama, input_ids, cache)
    with pytest.raises(ValueError, match="prefill_chunk_size=256"):
        store.keep(cache, input_ids)
    with pytest.raises(ValueError, match="and no copy"):
        store.keep(cache.fork(1)[0], input_ids)
    assert store.stats()["bytes_on_disk"] == 0


def test_custom_generate(tiny_llama, tmp_path):
    input_ids, store = prompt(600), PromptStore(tmp_path)
    options = {"max_new_tokens": 40, "do_sample": False, "custom_generate": store.generate}
    tokens = tiny_llama.generate(input_ids, spec="gear-t22", **options)
    assert torch.equal(tiny_llama.generate(input_ids, spec="gear-t22", **options), tokens)
    assert store.stats()["hits"] == 1 and store.stats()["tokens_saved"] == 512
    expected = store.cache_for(tiny_llama, input_ids, "gear-t22")
    plain = tiny_llama.generate(input_ids, past_key_values=expected, max_new_tokens=40, do_sample=False)
    assert torch.equal(plain, tokens)
    padded = torch.ones_like(input_ids)
    padded[:, :3] = 0
    with pytest.raises(ValueError, match="`attention_mask` hides tokens"):
        tiny_llama.generate(input_ids, attention_mask=padded, **options)


def test_other_settings_and_models_share_nothing(tiny_model, tmp_path):
    model, input_ids, store = tiny_model("llama"), prompt(600), PromptStore(tmp_path)
    store.read(model, input_ids)
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight *= 1.1
    for asked, name in ((other, "gear"), (model, "gear:nbits=2"), (tiny_model("llama").bfloat16(), "gear")):
        assert store.cache_for(asked, input_ids, name).get_seq_length() == 0
    assert PromptStore(tmp_path, block_tokens=320).cache_for(model, input_ids).get_seq_length() == 0
    assert store.cache_for(model, input_ids, GEARCache(model.config, nbits=4)).get_seq_length() == 0
    assert store.cache_for(model, input_ids, create_cache("gear", model)).get_seq_length() == 512


def test_what_cannot_be_kept_is_refused(tiny_llama, tmp_path):
    store = PromptStore(tmp_path)
    with pytest.raises(ValueError, match="one prompt of shape"):
        store.read(tiny_llama, torch.zeros(2, 300, dtype=torch.long))
    with pytest.raises(ValueError, match="has to be a cache of GEAR's"):
        store.cache_for(tiny_llama, prompt(10), "h2o")
    with pytest.raises(ValueError, match="`sliding` has to be"):
        store.cache_for(tiny_llama, prompt(10), sliding="compressed")
    with pytest.raises(ValueError, match="`block_tokens`"):
        PromptStore(tmp_path, block_tokens=0)
    with pytest.raises(ValueError, match="`max_bytes`"):
        PromptStore(tmp_path, max_bytes="much")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`folder`"):
        PromptStore(tmp_path / "file" / "below")
