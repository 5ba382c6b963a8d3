"""`GEARCache` on whole models: options, layers, bytes, and that nothing dense is ever built under `sdpa`. Forks of a
packed cache continue as copies do and hold their prefix once.
"""

import copy
import inspect
from functools import partial

import pytest
import torch
from decoding import decode_logits

from kvcache_plugins import GEARCache, create_cache, list_caches, measure_memory
from kvcache_plugins.gear.config import GEARConfig
from kvcache_plugins.reports.memory import reachable_tensors


PACKED_NAMES = [
    name
    for pattern in ("gear*", "k[ic]v*", "per-token*", "transform*", "calibrated*")
    for name in list_caches(pattern)
]
# One of each kind; the others differ from these in bits
DAILY = ("transform", "gear-4bit", "calibrated-16", "gear-l-2bit", "kivi-2bit", "kcvt-4bit")


def generate(model, input_ids, cache, **kwargs):
    kwargs = {"max_new_tokens": 80, "do_sample": False, **kwargs}
    return model.generate(input_ids, past_key_values=cache, **kwargs)


def prompt(model, batch_size=2, length=200):
    return torch.randint(3, model.config.vocab_size, (batch_size, length))


def test_options_that_do_not_fit_the_model_are_named(tiny_llama):
    with pytest.raises(ValueError, match="rank.*at most 32, the head dimension.*33"):
        GEARCache(tiny_llama.config, rank=33)
    with pytest.raises(ValueError, match=r"q_group_size.*head dimension, 32.*64.*\[1, 2, 4, 8, 16, 32\]"):
        GEARCache(tiny_llama.config, nbits=2, q_group_size=64)
    # Without the config they are found out at the first update, before anything is stored
    cache = GEARCache(nbits=2, q_group_size=64)
    with pytest.raises(ValueError, match="q_group_size"):
        tiny_llama(prompt(tiny_llama), past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.long) for name in PACKED_NAMES]
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


def test_presets_differ_in_bytes_and_logits(tiny_llama):
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


def test_eager_attention_equals_sdpa_with_padding(tiny_model):
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
        # Decoded tokens depend on the last bits of attention
        prompts = (layer.to_dense("keys")[:, :, : input_ids.shape[1]] for layer in (told, shown))
        assert torch.allclose(*prompts, atol=1e-3)


CHANGED = [
    *({"nbits": 2}, {"key_nbits": 8}, {"value_nbits": 2}, {"backbone": "per-token"}, {"sparsity": 0.01}, {"rank": 0}),
    *({"decode_rank": 1}, {"num_iterations": 2}, {"num_sink_tokens": 4}, {"rotate_values": True}),
    {"residual_length": 32},
]


def test_class_and_preset_have_the_papers_options(tiny_llama):
    """4-bit KCVT, rank 4 for the prompt and 2 for decoded chunks, 2 % outliers, a buffer of 64."""
    paper = GEARConfig(
        key_nbits=4, value_nbits=4, backbone=None, residual_length=64, sparsity=0.02, rank=4, decode_rank=2
    )
    assert (paper.key_backbone, paper.value_backbone) == ("kcvt", "kcvt")
    for cache in (GEARCache(), GEARCache(tiny_llama), create_cache("gear"), create_cache("gear-4bit", tiny_llama)):
        assert cache.cache_config == paper


@pytest.mark.parametrize("make", [GEARCache, partial(create_cache, "gear")], ids=["class", "preset"])
def test_backbone_low_rank_and_outliers_are_stored(tiny_llama, make):
    cache = make(tiny_llama)
    with torch.no_grad():
        tiny_llama(prompt(tiny_llama, 1, 1024), past_key_values=cache)
    parts = cache.memory().parts
    assert all(parts[part] > 0 for part in ("codes", "scales", "low_rank", "outliers"))


def test_class_has_at_most_15_options():
    assert len(inspect.signature(GEARCache).parameters) <= 15


@pytest.mark.parametrize("options", CHANGED, ids=str)
def test_every_option_changes_the_config_and_survives(options):
    config = GEARCache(**options).cache_config
    assert config != GEARCache().cache_config
    assert create_cache("gear", **options).cache_config == config
    assert GEARCache(**config.to_options()).cache_config == config


def test_bits_that_have_no_effect_are_refused():
    with pytest.raises(ValueError, match="`nbits` has no effect beside `key_nbits` and `value_nbits`"):
        create_cache("gear-k4v3", nbits=2)


@pytest.mark.parametrize(("backbone", "cache"), [("transform", "TransformCodingCache"), ("kvarn", "KVarNCache")])
def test_backbones_replaced_by_caches_are_named(backbone, cache):
    with pytest.raises(ValueError, match=f'`backbone="{backbone}"` is a cache of its own now: `{cache}`'):
        GEARCache(backbone=backbone)


OPTIONS = {"nbits": 2, "residual_length": 32, "q_group_size": 16}
NUM_DECODED = 111


def tokens(length, seed):
    return torch.randint(2, 128, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fill(model, cache, length=130):
    prefix = tokens(length, 0)
    model(prefix, past_key_values=cache)
    return prefix


@torch.no_grad()
def logits_of(model, cache, continuation):
    """One token after another, so that chunks are compressed on the way."""
    steps = [model(token[None], past_key_values=cache).logits for token in continuation.T]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize(
    ("architecture", "name", "options"),
    [("llama", "gear", OPTIONS), ("gemma3-hybrid", "gear", OPTIONS), ("llama", "transform", {})],
    ids=["groups", "hybrid", "rows"],
)
def test_forks_continue_as_copies_do(tiny_model, architecture, name, options):
    model = tiny_model(architecture)
    cache = create_cache(name, model.config, **options)
    fill(model, cache)
    # Into a chunk, so that there are a buffer and decoded blocks with room for more, to be shared or not
    logits_of(model, cache, tokens(NUM_DECODED, 1))
    alone = [copy.deepcopy(cache) for _ in range(3)]
    forks = cache.fork(3)
    continuations = [tokens(50, seed) for seed in (2, 3, 4)]
    # In turn, so that one would write over another's tokens where they shared a buffer
    steps = [
        [logits_of(model, fork, each[:, [step]]) for fork, each in zip(forks, continuations, strict=True)]
        for step in range(50)
    ]
    for logits, single, continuation in zip(zip(*steps, strict=True), alone, continuations, strict=True):
        expected = logits_of(model, single, continuation)
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert [fork.get_seq_length() for fork in forks] == [130 + NUM_DECODED + 50] * 3
    # The one that was forked has seen nothing of it, and goes on too
    assert cache.get_seq_length() == 130 + NUM_DECODED
    again = copy.deepcopy(cache)
    expected = logits_of(model, again, continuations[0])
    torch.testing.assert_close(logits_of(model, cache, continuations[0]), expected)


@pytest.mark.parametrize(("name", "options"), [("gear", OPTIONS), ("transform", {})], ids=["groups", "rows"])
def test_forks_share_one_prefix(tiny_model, name, options):
    model = tiny_model("llama")
    cache = create_cache(name, model.config, **options)
    fill(model, cache, 1030)
    one = cache.memory().total_bytes
    forks = cache.fork(16)
    together = measure_memory([cache, *forks])
    assert together.total_bytes < 1.1 * one
    assert together.dense_bytes == 17 * cache.memory().dense_bytes
    assert measure_memory([cache, *(copy.deepcopy(cache) for _ in range(16))]).total_bytes == 17 * one
    for fork in forks:
        logits_of(model, fork, tokens(5, 7))
    own = [tensor for fork in forks for layer in fork.layers for tensor in layer.storage.tail.tensors()]
    assert measure_memory(forks).total_bytes == one + sum(tensor.nbytes for tensor in own)


def test_an_empty_cache_can_be_forked(tiny_model):
    model = tiny_model("llama")
    fork, other = GEARCache(model.config).fork(2)
    fill(model, fork)
    assert (fork.get_seq_length(), other.get_seq_length()) == (130, 0)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_fork_checks_its_count(count):
    with pytest.raises(ValueError, match="`count` has to be an integer of at least 1 but got"):
        GEARCache().fork(count)
