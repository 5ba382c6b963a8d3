"""Layers of a window in a calibration: what is asked of them, what they share, and what a file has of them."""

import dataclasses

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins import GEARCache
from kvcache_plugins.contract.subject import RECORDS_PAST
from kvcache_plugins.gear import TransformCalibration, calibrate_transform
from kvcache_plugins.models.rotary_frequencies import rotary_frequencies


SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 20, "initializer_range": 0.2}
WINDOW = 80


@pytest.fixture(scope="module")
def model(tiny_model) -> PreTrainedModel:
    """Layers of a window and of full attention in turns."""
    return tiny_model("gemma3-hybrid", seed=0, sliding_window=WINDOW, **SIZES)


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel, random_windows) -> TransformCalibration:
    return calibrate_transform(model, random_windows(3, 300))


@pytest.fixture(scope="module")
def window(random_windows) -> torch.Tensor:
    """Tokens that are not in the calibration."""
    return random_windows(4, 300)[3]


def make_cache(
    model: PreTrainedModel, calibration: object, sliding: str = "compressed", **options: object
) -> GEARCache:
    return GEARCache(model, backbone="transform", nbits=3.0, sliding=sliding, calibration=calibration, **options)


def of_window(calibration: TransformCalibration, seen: int | None) -> TransformCalibration:
    """The layers alone that see so many tokens."""
    layers = [layer for layer in calibration.content.layers if layer.window == seen]
    return TransformCalibration(dataclasses.replace(calibration.content, layers=layers))


def test_layers_of_a_window_take_part(model, calibration, tmp_path):
    assert [layer.window for layer in calibration.layers.values()] == [WINDOW, None, WINDOW, None]
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    read = TransformCalibration.load(path, model)
    assert read.digest == calibration.digest
    assert [layer.window for layer in read.layers.values()] == [WINDOW, None, WINDOW, None]
    assert all(layer.packing.fixed is not None for layer in make_cache(model, read).layers)


def test_what_no_query_sees_does_not_count(model, random_windows):
    """The cost of an error is that of a token in sight, however long the text before it is."""
    energies = []
    for length in (120, 300):
        # The following tokens are as many
        windows = [each[-length:] for each in random_windows(6, 300)]
        layers = calibrate_transform(model, windows).layers
        energies.append([float(layers[index].values.energies.sum()) for index in (0, 2)])
    for few, many in zip(*energies, strict=True):
        assert 0.4 < many / few < 2.5


@pytest.mark.parametrize("quantizer", ["lloyd-max", "trellis"])
@pytest.mark.parametrize("seen", [None, WINDOW], ids=["full", "window"])
def test_layers_share_bytes_with_those_that_see_as_much(model, calibration, quantizer, seen):
    """At every length of a text they hold the bytes that were asked for."""
    own = [index for index, layer in calibration.layers.items() if layer.window == seen]
    alone = of_window(calibration, seen)
    sizes = [
        [each.codec(index, 3.0, quantizer, rotary_frequencies(model.config, index)).row_sizes for index in own]
        for each in (calibration, alone)
    ]
    assert sizes[0] == sizes[1]
    if quantizer == "lloyd-max":
        # A byte of scale, and three bits for each of three blocks of eight components, of keys and values
        assert sum(map(sum, sizes[0])) == len(own) * 2 * (1 + 3 * 3)


def test_it_is_nearer_to_dense_than_by_prompts_alone(model, calibration, window, divergence):
    full_only = of_window(calibration, None)
    by_all, by_full, by_none = (
        divergence(model, make_cache(model, each), window) for each in (calibration, full_only, None)
    )
    assert by_all < min(by_full, by_none) / 2


@pytest.mark.skipif(not RECORDS_PAST, reason="older releases of Transformers keep windows in another form")
@pytest.mark.parametrize("length", [60, 290], ids=str)
@torch.no_grad()
def test_a_saved_cache_goes_on_when_windows_have_let_go(model, calibration, window, tmp_path, length):
    cache, path = make_cache(model, calibration), tmp_path / "cache.safetensors"
    model(window[None, : length // 2], past_key_values=cache)
    for position in range(length // 2, length):
        model(window[None, position : position + 1], past_key_values=cache)
    cache.save(path, model)
    loaded = GEARCache.load(path, model, calibration=calibration)
    assert (loaded.layers[0].prefix is None) == (length > WINDOW) and loaded.layers[1].prefix is not None
    for position in range(40):
        logits = [
            model(window[None, position : position + 1], past_key_values=each).logits for each in (cache, loaded)
        ]
        assert torch.equal(*logits)


def test_it_is_compiled_before_the_first_token(model, calibration):
    for each in (calibration, of_window(calibration, None)):
        make_cache(model, each).warm_up(model)
