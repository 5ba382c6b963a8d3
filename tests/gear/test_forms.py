"""`GEARCache()` and `create_cache("gear", model)` are the same; what only a quantized backbone has makes it GEAR's."""

import warnings

import pytest

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.gear import calibrate_transform
from kvcache_plugins.gear.config import GEARConfig, TransformConfig
from kvcache_plugins.gear.transform.calibration import calibration_path
from kvcache_plugins.registry import check_caches


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
