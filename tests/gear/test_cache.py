"""`GEARCache` on whole models: options, layers, bytes, and that nothing dense is ever built under `sdpa`."""

import pytest
import torch
from decoding import decode_logits

from kvcache_plugins import GEARCache, create_cache, list_caches
from kvcache_plugins.reports.memory import reachable_tensors


GEAR_NAMES = list_caches("gear*") + list_caches("k[ic]v*") + list_caches("per-token*")
# One of each kind; the others differ from these in bits
DAILY = ("gear", "gear-4bit", "gear-c16", "gear-l-2bit", "kivi-2bit", "kcvt-4bit")


def generate(model, input_ids, cache, **kwargs):
    kwargs = {"max_new_tokens": 80, "do_sample": False, **kwargs}
    return model.generate(input_ids, past_key_values=cache, **kwargs)


def prompt(model, batch_size=2, length=200):
    return torch.randint(3, model.config.vocab_size, (batch_size, length))


def test_options_that_do_not_fit_the_model_are_named(tiny_llama):
    with pytest.raises(ValueError, match="rank.*head dimension, 32.*33"):
        GEARCache(tiny_llama.config, rank=33)
    with pytest.raises(ValueError, match=r"q_group_size.*head dimension, 32.*64.*\[1, 2, 4, 8, 16, 32\]"):
        GEARCache(tiny_llama.config, nbits=2, q_group_size=64)
    # Without the config they are found out at the first update, before anything is stored
    cache = GEARCache(nbits=2, q_group_size=64)
    with pytest.raises(ValueError, match="q_group_size"):
        tiny_llama(prompt(tiny_llama), past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.long) for name in GEAR_NAMES]
)
def test_memory_is_the_sum_of_all_reachable_tensors(tiny_llama, name):
    cache = create_cache(name, tiny_llama)
    generate(tiny_llama, prompt(tiny_llama), cache)
    report = cache.memory()
    tensors = list(reachable_tensors(cache))
    assert report.total_bytes == sum(tensor.nbytes for tensor in tensors)
    assert sum(report.devices.values()) == report.total_bytes
    # Nothing stands behind a view that is not counted
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(storages.values()) == report.total_bytes
    config = tiny_llama.config
    expected = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * cache.get_seq_length()
    assert report.num_values == expected
    assert report.dense_bytes == 4 * expected
    assert report.kv_percent == pytest.approx(100 * report.total_bytes / (2 * expected))


def test_switches_change_the_bytes_and_the_logits(tiny_llama):
    """A method whose parts make no difference was the commonest complaint about the released code."""
    input_ids = prompt(tiny_llama, length=256)
    logits, sizes = {}, {}
    for name in ("gear-2bit", "gear-l-2bit", "kivi-2bit", "gear-4bit", "kcvt-4bit", "per-token-2bit"):
        cache = create_cache(name, tiny_llama)
        tiny_llama(input_ids[:, :-1], past_key_values=cache)
        sizes[name] = cache.memory().parts
        logits[name] = tiny_llama(input_ids[:, -1:], past_key_values=cache).logits
    names = list(logits)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert not torch.equal(logits[first], logits[second])
    assert "outliers" not in sizes["gear-l-2bit"]
    assert "low_rank" not in sizes["kivi-2bit"]
    assert sizes["gear-4bit"]["codes"] == 2 * sizes["gear-2bit"]["codes"] * 255 // 192


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "llama-mqa", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_nothing_is_made_dense_under_sdpa(tiny_model, architecture, padded):
    model = tiny_model(architecture)
    input_ids = prompt(model)
    mask = torch.ones_like(input_ids)
    if padded:
        mask[1, :70] = 0
    cache = GEARCache(model.config, nbits=8)
    output = generate(model, input_ids, cache, attention_mask=mask, max_new_tokens=24)
    stats = cache.stats()
    assert stats["dense_reads"] == 0
    assert stats["attend_calls"] == 2 * 23
    assert stats["prompts_without_mask"] == 0
    assert stats["layers_compressing"] == 2
    # The same tokens through the same cache, by its answer to eager attention
    given = input_ids, output[:, input_ids.shape[1] :], mask
    logits = decode_logits(model, GEARCache(model.config, nbits=8), *given)
    model.set_attn_implementation("eager")
    dense = GEARCache(model.config, nbits=8, attention_mask=mask)
    assert torch.allclose(logits, decode_logits(model, dense, *given), atol=0.02 * logits.std().item())


def test_eager_attention_can_be_told_the_padding(tiny_model):
    model = tiny_model("llama", attn_implementation="eager")
    input_ids = prompt(model)
    mask = torch.ones_like(input_ids)
    mask[1, :70] = 0
    cache = GEARCache(model.config, nbits=2, attention_mask=mask)
    generate(model, input_ids, cache, attention_mask=mask)
    model.set_attn_implementation("sdpa")
    seen = GEARCache(model.config, nbits=2)
    generate(model, input_ids, seen, attention_mask=mask)
    for told, shown in zip(cache.layers, seen.layers, strict=True):
        # What was decoded depends on the last bits of attention
        prompts = (layer.materialize("keys")[:, :, : input_ids.shape[1]] for layer in (told, shown))
        assert torch.allclose(*prompts, atol=1e-3)
