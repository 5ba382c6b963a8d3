"""`GEARCache` on whole models: options of both backbones, layers, bytes, and that nothing dense is ever built under
`sdpa`. `GEARCache()` and `create_cache("gear", model)` are the same; what only a quantized backbone has makes it
GEAR's. Caches that share a compressed prefix go on as they would alone, and the prefix is held once.
"""

import copy
import warnings

import pytest
import torch
from decoding import decode_logits
from transformers import LlamaConfig

from kvcache_plugins import GEARCache, create_cache, list_caches, measure_memory
from kvcache_plugins.gear import calibrate_transform
from kvcache_plugins.gear.config import GEARConfig, TransformConfig
from kvcache_plugins.gear.transform.calibration import calibration_path
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.registry import check_caches
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


QUANTIZED = [
    *({"nbits": 4}, {"key_nbits": 4}, {"value_nbits": 2}, {"q_group_size": 32}, {"sparsity": 0.01}),
    *({"key_sparsity": 0.0}, {"rank": 0}, {"value_rank": 2}, {"decode_rank": 1}, {"key_decode_rank": 1}),
    *({"num_iterations": 2}, {"low_rank_recent_ratio": 0.5}, {"rotate_values": False}, {"key_backbone": "kivi"}),
    {"backbone": "per-token"},
]
SHARED = [{}, {"residual_length": 64}, {"num_sink_tokens": 0}, {"quantizer": "trellis"}, {"sliding": "dense"}]


def test_class_and_short_name_are_the_same(tiny_llama):
    caches = [
        *(GEARCache(), GEARCache(tiny_llama.config), GEARCache(tiny_llama)),
        *(create_cache("gear"), create_cache("gear", tiny_llama.config), create_cache("gear", tiny_llama)),
    ]
    expected = create_cache("gear-t25").gear_config
    assert isinstance(expected, TransformConfig)
    assert all(cache.gear_config == expected and cache.calibration is None for cache in caches)


@pytest.mark.parametrize("options", QUANTIZED, ids=str)
def test_options_of_a_quantized_backbone_make_gears_own_form(options):
    config = GEARCache(**options).gear_config
    assert isinstance(config, GEARConfig)
    assert create_cache("gear", **options).gear_config == config
    # As in the paper, but for what was given
    assert GEARCache(**{"nbits": 4, **options}).gear_config == config
    assert GEARCache(nbits=4).gear_config == create_cache("gear-4bit").gear_config


@pytest.mark.parametrize("options", SHARED, ids=str)
def test_options_of_both_forms_leave_the_default(options):
    config = GEARCache(**options).gear_config
    assert config == GEARCache(backbone="transform", **options).gear_config
    assert GEARCache(**{**options, "quantizer": None, "nbits": 2}).gear_config.key.nbits == 2


def test_bits_of_one_side_leave_the_others_default():
    config = GEARCache(backbone="transform", key_nbits=3).gear_config
    assert (config.key_nbits, config.value_nbits) == (3, GEARCache().gear_config.value_nbits)


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", seed=0, initializer_range=0.2)


@pytest.fixture
def kept(model, random_windows, tmp_path, monkeypatch):
    """The file of the model's calibration, where caches look for it."""
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    path = calibration_path(model)
    path.parent.mkdir(parents=True)
    calibrate_transform(model, random_windows(1, 200)).save(path)
    return path


def test_a_models_calibration_is_found(model, tiny_model, kept):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caches = [GEARCache(model), create_cache("gear", model)]
        # Of the same config, with other weights; and what cannot tell its weights
        without = [GEARCache(tiny_model("llama", seed=1, initializer_range=0.2)), GEARCache(model.config)]
        without += [create_cache("gear", model.config), create_cache("gear-t25", model), GEARCache()]
    assert caches[0].calibration is caches[1].calibration is not None
    assert caches[0].gear_config == caches[1].gear_config
    assert all(cache.calibration is None for cache in without)
    # As many bits, shared by what they are worth
    bits = without[0].gear_config
    assert 2 * caches[0].gear_config.key_nbits == bits.key_nbits + bits.value_nbits
    assert GEARCache(model, nbits=2).calibration is None


def test_those_of_the_package_are_for_who_asks_for_them(smollm2):
    model, _ = smollm2
    assert create_cache("gear-c16", model).calibration is not None
    assert create_cache("gear", model).calibration is GEARCache(model).calibration is None


def test_a_calibration_may_be_given_alone(model, kept):
    cache = GEARCache(model.config, calibration=kept)
    assert cache.gear_config == GEARCache(model).gear_config
    assert check_caches([f"gear:calibration={kept}"])
    with pytest.raises(ValueError, match="`calibration` is for the `transform` backbone"):
        GEARCache(model.config, calibration=kept, nbits=2)


def test_a_calibration_that_cannot_be_read_is_gone_without(model, kept):
    kept.write_bytes(kept.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="goes without a calibration: `calibration`.*damaged"):
        cache = GEARCache(model)
    assert cache.calibration is None
    with pytest.raises(ValueError, match="damaged"):
        create_cache("gear-c16", model)


def test_windows_are_dense_unless_they_are_long():
    assert GEARCache().gear_config.least_window == 2048
    assert GEARCache(residual_length=1024).gear_config.least_window == 8192


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
    ("architecture", "options"),
    [("llama", OPTIONS), ("gemma3-hybrid", OPTIONS), ("llama", {})],
    ids=["groups", "hybrid", "rows"],
)
def test_forks_go_on_as_copies_do(tiny_model, architecture, options):
    model = tiny_model(architecture)
    cache = GEARCache(model.config, **options)
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


@pytest.mark.parametrize("options", [OPTIONS, {}], ids=["groups", "rows"])
def test_the_prefix_is_held_once(tiny_model, options):
    model = tiny_model("llama")
    cache = GEARCache(model.config, **options)
    fill(model, cache, 1030)
    one = cache.memory().total_bytes
    forks = cache.fork(16)
    together = measure_memory([cache, *forks])
    assert together.total_bytes < 1.1 * one
    assert together.dense_bytes == 17 * cache.memory().dense_bytes
    assert measure_memory([cache, *(copy.deepcopy(cache) for _ in range(16))]).total_bytes == 17 * one
    for fork in forks:
        logits_of(model, fork, tokens(5, 7))
    own = [tensor for fork in forks for layer in fork.layers for tensor in layer.buffer.tensors()]
    assert measure_memory(forks).total_bytes == one + sum(tensor.nbytes for tensor in own)


def test_an_empty_cache_can_be_forked(tiny_model):
    model = tiny_model("llama")
    fork, other = GEARCache(model.config).fork(2)
    fill(model, fork)
    assert (fork.get_seq_length(), other.get_seq_length()) == (130, 0)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_count_is_checked(count):
    with pytest.raises(ValueError, match="`count` has to be an integer of at least 1 but got"):
        GEARCache().fork(count)


def test_bits_are_rounded_to_whole_blocks():
    config = TransformConfig(key_nbits=2.4, value_nbits=2)
    assert config.code_bytes(64, 64) == (19, 16)
    assert config.code_bytes(20, 64)[0] == 7
    # A row is a word at least, and eight bits a channel at most
    assert TransformConfig(key_nbits=0.1, value_nbits=8).code_bytes(64, 20) == (3, 24)


def test_one_side_alone_has_no_such_backbone():
    with pytest.raises(ValueError, match="key_backbone"):
        GEARCache(key_backbone="transform")


def test_presets_and_frequencies_of_a_config():
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2, rope_parameters=None)
    cache = create_cache("gear-t16", config)
    assert all(isinstance(layer, CompressedLayer) for layer in cache.layers)
    assert all(len(layer.packing.codecs.frequencies) == 32 for layer in cache.layers)
    assert cache.gear_config == TransformConfig(key_nbits=2.375, value_nbits=2.0, recent_length=80)
    assert GEARCache(backbone="transform")._next_layer().packing.codecs.frequencies is None


def test_options_make_the_same_config():
    config = TransformConfig(key_nbits=2.375, value_nbits=2, residual_length=3, num_sink_tokens=0)
    assert GEARCache(**config.to_options()).gear_config == config
    assert config.shortest_prompt == 64
    config = TransformConfig(key_nbits=2.23, value_nbits=2.23, quantizer="trellis")
    assert GEARCache(**config.to_calibrated_options()).gear_config == config
