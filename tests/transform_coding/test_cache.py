"""`TransformCodingCache`: options, presets, layers, and which calibration it takes."""

import inspect
import warnings

import pytest
from transformers import LlamaConfig

from kvcache_plugins import TransformCodingCache, create_cache
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.registry import RENAMED_CACHES, check_caches, list_caches
from kvcache_plugins.transform_coding import calibrate_transform
from kvcache_plugins.transform_coding.calibration import calibration_path
from kvcache_plugins.transform_coding.config import TransformCodingConfig


CHANGED = [
    *({"nbits": 3}, {"key_nbits": 3}, {"residual_length": 64}, {"num_sink_tokens": 0}),
    *({"sliding": "dense"}, {"recent_length": 0}, {"recent_nbits": 1}),
]


def test_class_and_preset_are_the_same(tiny_llama):
    caches = [TransformCodingCache(), TransformCodingCache(tiny_llama), create_cache("transform", tiny_llama.config)]
    expected = TransformCodingConfig(key_nbits=4.0, value_nbits=3.25)
    assert all(cache.cache_config == expected and cache.calibration is None for cache in caches)


def test_class_has_a_bounded_number_of_options():
    assert len(inspect.signature(TransformCodingCache).parameters) == 12


@pytest.mark.parametrize("options", CHANGED, ids=str)
def test_every_option_changes_the_config_and_survives(options):
    config = TransformCodingCache(**options).cache_config
    assert config != TransformCodingCache().cache_config
    assert TransformCodingCache(**config.to_options()).cache_config == config


def test_bits_of_one_side_leave_the_others_default():
    config = TransformCodingCache(key_nbits=3).cache_config
    assert (config.key_nbits, config.value_nbits) == (3, 3.25)


def test_bits_that_have_no_effect_are_refused():
    with pytest.raises(ValueError, match="`nbits` has no effect beside `key_nbits` and `value_nbits`"):
        create_cache("transform-16", nbits=2)


@pytest.mark.parametrize(("old", "new"), RENAMED_CACHES.items())
def test_old_names_are_refused_by_their_new_ones(old, new):
    assert old not in list_caches() and new in list_caches()
    with pytest.raises(ValueError, match=f"`{old}` has another name now: `{new}`"):
        create_cache(old)


def test_old_class_is_refused_by_its_new_name():
    import kvcache_plugins

    with pytest.raises(ValueError, match="`InfiniGenTransformCache`"):
        _ = kvcache_plugins.InfiniGenGEARCache


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", seed=0, initializer_range=0.2)


@pytest.fixture
def kept(model, random_windows, tmp_path, monkeypatch):
    """Write the model's calibration where caches look for it; returns its file."""
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    path = calibration_path(model)
    path.parent.mkdir(parents=True)
    calibrate_transform(model, random_windows(1, 200)).save(path)
    return path


def test_a_calibration_is_taken_only_if_asked_for(model, tiny_model, kept):
    assert TransformCodingCache(model).calibration is create_cache("transform", model).calibration is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [TransformCodingCache(model, calibration=each) for each in ("auto", kept)]
        found.append(create_cache("transform", model.config, calibration=kept))
    assert len({cache.calibration.digest for cache in found}) == 1
    # Without `nbits` as many bits as without a calibration, on average
    assert all(cache.cache_config == TransformCodingConfig(key_nbits=3.625, value_nbits=3.625) for cache in found)
    assert check_caches([f"transform:calibration={kept}"])


@pytest.mark.parametrize("of", ["other weights", "a config"])
def test_auto_ignores_a_calibration_of_other_weights(model, tiny_model, kept, of):
    other = tiny_model("llama", seed=1, initializer_range=0.2) if of == "other weights" else model.config
    with pytest.warns(UserWarning, match="this model has no calibration"):
        assert TransformCodingCache(other, calibration="auto").calibration is None


def test_bits_of_one_side_are_refused_beside_a_calibration(model, kept):
    with pytest.raises(ValueError, match="`key_nbits` has no effect beside `calibration`"):
        TransformCodingCache(model, calibration=kept, key_nbits=2)


def test_a_damaged_calibration_is_refused(model, kept):
    kept.write_bytes(kept.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        create_cache("calibrated-16", model)


def test_packaged_calibrations_are_found(smollm2):
    model, _ = smollm2
    assert create_cache("calibrated-16", model).calibration is not None


def test_windows_are_dense_unless_they_are_long():
    assert TransformCodingCache().cache_config.least_window == 2048
    assert TransformCodingCache(residual_length=1024).cache_config.least_window == 8192


def test_bits_are_rounded_to_whole_blocks():
    config = TransformCodingConfig(key_nbits=2.4, value_nbits=2)
    assert config.code_bytes(64, 64) == (19, 16)
    assert config.code_bytes(20, 64)[0] == 7
    # A row is a word at least, and eight bits a channel at most
    assert TransformCodingConfig(key_nbits=0.1, value_nbits=8).code_bytes(64, 20) == (3, 24)


def test_presets_and_frequencies_of_a_config():
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2, rope_parameters=None)
    cache = create_cache("transform-16", config)
    assert all(isinstance(layer, RowLayer) for layer in cache.layers)
    assert all(len(layer.policy.make_codec.rotary.frequencies) == 32 for layer in cache.layers)
    assert cache.cache_config == TransformCodingConfig(key_nbits=2.375, value_nbits=2.0, recent_length=80)
    assert TransformCodingCache()._next_layer().policy.make_codec.rotary.frequencies == ()


def test_calibrated_options_make_the_same_config():
    config = TransformCodingConfig(key_nbits=2.23, value_nbits=2.23, num_sink_tokens=0)
    assert TransformCodingCache(**config.to_calibrated_options()).cache_config == config
