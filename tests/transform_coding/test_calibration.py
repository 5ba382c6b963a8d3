"""Calibration of transform coding: the text observed, the file, what refuses it, and the cache that is coded by it."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import TransformCodingCache, choose_cache, create_cache, measure_memory, predict_memory
from kvcache_plugins.advice.choose_by_kl import default_candidates
from kvcache_plugins.contract import CONTRACT, run_contract
from kvcache_plugins.eval.tiny_models import build_family
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.rotary_frequencies import rotary_embedding
from kvcache_plugins.transform_coding import TransformCalibration, calibrate_transform
from kvcache_plugins.transform_coding import calibration as module
from kvcache_plugins.transform_coding.calibration import calibration_path
from kvcache_plugins.transform_coding.observation import SideSums, observe_window


SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 20, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def model(tiny_model) -> PreTrainedModel:
    return tiny_model("llama", seed=0, **SIZES)


@pytest.fixture(scope="module")
def other(tiny_model) -> PreTrainedModel:
    """Builds a model of the same config with other weights."""
    return tiny_model("llama", seed=1, **SIZES)


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel, random_windows) -> TransformCalibration:
    return calibrate_transform(model, random_windows(3, 300))


@pytest.fixture(scope="module")
def window(random_windows) -> torch.Tensor:
    """Tokens that are not in the calibration."""
    return random_windows(4, 300)[3]


def keep(calibration: TransformCalibration, model: PreTrainedModel) -> Path:
    """Puts a calibration where caches of its model look for it."""
    path = calibration_path(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    calibration.save(path)
    return path


def make_cache(
    model: PreTrainedModel, calibration: object, nbits: float = 3.0, **options: object
) -> TransformCodingCache:
    return TransformCodingCache(model, nbits=nbits, calibration=calibration, **options)


def test_a_calibration_survives_its_file(model, calibration, window, tmp_path, divergence):
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    read = TransformCalibration.load(path, model)
    assert (read.config, list(read.layers)) == (calibration.config, [0, 1])
    assert torch.equal(read.weights, calibration.weights)
    assert TransformCalibration.load(path, model) is read and TransformCalibration.load(path, model.config) is read
    assert read.digest == calibration.digest
    for index, layer in calibration.layers.items():
        assert read.layers[index].layout == layer.layout
        own = dict(layer.named_tensors())
        assert len(own) == 10
        assert all(torch.equal(tensor, own[name]) for name, tensor in read.layers[index].named_tensors())
    assert divergence(model, make_cache(model, path), window) == divergence(model, make_cache(model, read), window)


def test_another_models_file_is_refused(model, other, tiny_model, calibration, tmp_path):
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    narrower = tiny_model("llama", num_key_value_heads=1, **SIZES)
    for refused, given in ((other, path), (other, calibration), (narrower, path), (narrower.config, path)):
        with pytest.raises(ValueError, match="`calibration`.*another"):
            make_cache(refused, given)
    with pytest.raises(ValueError, match="needs `config`"):
        TransformCodingCache(calibration=path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="`calibration`"):
        make_cache(model, path)


def test_calibration_accepts_any_dtype(model, calibration):
    for dtype in (torch.bfloat16, torch.float16):
        assert calibration.mismatch(copy.deepcopy(model).to(dtype)) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_enabled_inside_no_grad(model, random_windows, mode):
    expected = calibrate_transform(model, random_windows(1, 200), num_draws=1)
    with mode():
        found = calibrate_transform(model, random_windows(1, 200), num_draws=1)
    for layer, other in zip(found.layers.values(), expected.layers.values(), strict=True):
        assert torch.equal(layer.keys.basis, other.keys.basis) and torch.equal(layer.values.basis, other.values.basis)


def test_states_of_another_model_are_refused(model, calibration):
    cache = make_cache(model.config, calibration)
    with pytest.raises(ValueError, match="layer 0: `calibration` is of 2 heads of 20, but got 2 of 24"):
        cache.update(torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 20), 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"key_nbits": 3}, "key_nbits"),
        ({"value_nbits": 3}, "value_nbits"),
        ({"calibration": 3}, "calibration"),
        ({"calibration": "no such file"}, "no such file"),
        ({"nbits": 9}, "nbits"),
    ],
    ids=str,
)
def test_bad_options_are_named(model, calibration, options, named):
    with pytest.raises(ValueError, match=named):
        TransformCodingCache(model, **{"calibration": calibration, **options})


def test_calibration_without_long_windows_is_refused(model, random_windows):
    for windows in ([], random_windows(1, 20)):
        with pytest.raises(ValueError, match="`windows` has to hold one window"):
            calibrate_transform(model, windows)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_latent_attention_and_recurrent_layers_are_calibrated(family, random_windows):
    model = build_family(family)
    cache = make_cache(model, calibrate_transform(model, random_windows(1, 192)))
    with torch.no_grad():
        model(random_windows(1, 100)[0][None], **as_argument(cache))
    assert cache.stats()["layers_compressing"] == 2


def test_attention_beside_a_recurrence_is_refused(random_windows):
    with pytest.raises(ValueError, match="attention beside a recurrence"):
        calibrate_transform(build_family("falcon_h1"), random_windows(1, 192))


@pytest.mark.filterwarnings("ignore:`config`. all layers of the model attend to a window")
def test_stats_count_nothing_where_windows_stay_dense(random_windows):
    model = build_family("mistral")
    cache = make_cache(model, calibrate_transform(model, random_windows(1, 192)))
    assert cache.stats()["layers_left"] == 2
    assert cache.stats()["tokens_compressed"] == 0


@pytest.mark.parametrize("nbits", [1.0, 2.5, 4.0])
def test_stored_bytes_are_as_requested(model, calibration, window, nbits):
    cache, length, sinks = make_cache(model, calibration, nbits), 150, 4
    with torch.no_grad():
        model(window[None, :length], past_key_values=cache)
    codes = cache.memory().parts["codes"]
    # Three blocks of eight for twenty channels, and a byte of scale; a head cannot have parts of a byte
    num_rows = (length - sinks) * 2 * 2 * 2
    assert 0 <= num_rows * (1 + 3 * nbits) - codes <= (length - sinks) * 2


def test_finer_rows_have_the_requested_extra_bits(model, calibration):
    codec = calibration.codec(0, 3.0, rotary_embedding(model.config, 0).frequencies)
    more = [codec.with_more_bits(nbits).row_sizes[0] - codec.row_sizes[0] for nbits in (3, 1)]
    assert more[0] == 3 * more[1] > 0


def test_shared_tables_are_counted_once(model, calibration, window):
    cache, other_rate = make_cache(model, calibration, 2.0), make_cache(model, calibration, 4.0)
    for each in (cache, other_rate):
        with torch.no_grad():
            model(window[None, :150], past_key_values=each)
    # Two layers of two heads of twenty channels: mean, factors, basis and its steps of keys and of values
    stored = 2 * 2 * 2 * 20 * (2 + 4 + 20 + 4)
    tables = [table for layer in cache.layers for table in layer.policy.shared_codec.formats()]
    own = sum(table.basis.inverse.nbytes + table.widths.nbytes for table in tables)
    memory = cache.memory()
    assert memory.shared == {"calibration": stored + own} and own <= 2 * 2 * 2 * (20 * 20 + 3)
    assert cache.stats()["calibration_bytes"] == stored + own
    assert "calibration" not in memory.parts and sum(memory.devices.values()) == memory.total_bytes
    held = memory.total_bytes + stored + own
    assert memory.kv_percent_with_shared == pytest.approx(memory.kv_percent * held / memory.total_bytes)
    assert f"and {(stored + own) / 1e3:.1f} kB that all caches of the model share" in repr(cache)
    assert "shared by all caches" in memory._repr_html_()
    assert measure_memory([cache, copy.deepcopy(cache), *cache.fork(2)]).shared == memory.shared
    both = measure_memory([cache, other_rate]).shared["calibration"]
    assert both == stored + own + other_rate.memory().shared["calibration"] - stored
    assert copy.deepcopy(cache).layers[0].codec.formats() is cache.layers[0].codec.formats()
    assert measure_memory(TransformCodingCache(model)).shared == {}


def test_more_bits_and_a_calibration_lower_the_kl(model, calibration, window, divergence):
    few, some, many = (divergence(model, make_cache(model, calibration, nbits), window) for nbits in (1.5, 3.0, 6.0))
    assert many < some / 4 < few / 16
    plain = divergence(model, TransformCodingCache(model, nbits=3.0), window)
    assert some < plain


@pytest.mark.parametrize("kernel", ["torch", "compiled"])
def test_rounded_bases_have_no_more_error_than_codes(model, calibration, window, monkeypatch, kernel):
    """With seven bits a number the only error is that of codes: 2^-6 of a key or value."""
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
    cache, dense = make_cache(model, calibration, 7.0), DynamicCache(config=model.config)
    with torch.no_grad():
        for each in (cache, dense):
            model(window[None, :200], past_key_values=each)
    for coded, exact in zip(cache.layers, dense.layers, strict=True):
        for side in ("keys", "values"):
            error = (coded.to_dense(side) - getattr(exact, side)).norm() / getattr(exact, side).norm()
            assert 0 < float(error) < 2**-5


# Checks that no calibration changes: `tests/contract` runs them on `transform`
OTHERS = ("sampling", "num-return-sequences", "beam-search", "prompt-lookup", "assisted", "multi-turn", "device-map")
CHANGED = [check for check in CONTRACT if check.name not in (*OTHERS, "hybrid")]


@pytest.mark.parametrize(
    ("kernel", "checks"),
    [pytest.param("torch", CONTRACT, marks=pytest.mark.long), ("compiled", CHANGED)],
    ids=["torch", "compiled"],
)
def test_calibrated_caches_keep_the_contract(model, calibration, tmp_path, monkeypatch, kernel, checks):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
    # Caches that are loaded look for it here
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    keep(calibration, model)
    results = run_contract(model, lambda: make_cache(model, calibration), checks=checks)
    failed = [f"{result.name}: {result.detail}" for result in results if result.status == "fail"]
    assert not failed
    assert "save-load" in {result.name for result in results if result.status == "pass"}


def test_a_preset_finds_the_models_own_calibration(model, other, calibration, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="has no calibration"):
        assert create_cache("calibrated-16", model).calibration is None
    path = keep(calibration, model)
    assert Path(tmp_path) in path.parents
    assert torch.equal(create_cache("calibrated-16", model).calibration.weights, calibration.weights)
    with pytest.warns(UserWarning, match="has no calibration"):
        assert create_cache("calibrated-16", other).calibration is None
    path.write_bytes(b"no calibration")
    with pytest.raises(ValueError, match="`calibration`"):
        create_cache("calibrated-16", model)


def test_a_saved_cache_continues_with_its_calibration(model, calibration, window, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    cache, path, given = make_cache(model, calibration), tmp_path / "cache", tmp_path / "c"
    with torch.no_grad():
        model(window[None, :120], past_key_values=cache)
        cache.save(path, model)
        calibration.save(given)
        keep(calibration, model)
        loaded = [TransformCodingCache.load(path, model), TransformCodingCache.load(path, model.config)]
        loaded += [TransformCodingCache.load(path, model, calibration=each) for each in (calibration, given)]
        expected = model(window[None, 120:160], past_key_values=cache).logits
        for each in loaded:
            assert each.memory() == cache.fork(1)[0].memory() or each.get_seq_length() == 120
            assert torch.equal(model(window[None, 120:160], past_key_values=each).logits, expected)
            assert each.memory().shared == cache.memory().shared
    # Rows, exact tokens and counters, but no basis
    assert path.stat().st_size < cache.memory().total_bytes + 20_000 + given.stat().st_size // 4


def test_a_saved_cache_is_refused_without_its_calibration(
    model, calibration, random_windows, window, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    path, plain = tmp_path / "cache", tmp_path / "plain"
    another = calibrate_transform(model, random_windows(1, 200))
    for cache, file in ((make_cache(model, calibration), path), (TransformCodingCache(model), plain)):
        with torch.no_grad():
            model(window[None, :120], past_key_values=cache)
        cache.save(file, model)
    keep(another, model)
    for own in (model, model.config):
        with pytest.raises(ValueError, match=r"`path`.*cache.*calibration .* not among those"):
            TransformCodingCache.load(path, own)
    with pytest.raises(ValueError, match=r"`path`.*cache.*another calibration"):
        TransformCodingCache.load(path, model, calibration=another)
    with pytest.raises(ValueError, match=r"`path`.*plain.*without a calibration"):
        TransformCodingCache.load(plain, model, calibration=calibration)


def test_choosing_tries_calibrated_presets_too(model, other, calibration, window, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    keep(calibration, model)
    assert {"calibrated-12", "transform-16"} <= set(
        default_candidates(model)
    ) and "calibrated-12" not in default_candidates(other)
    chosen = choose_cache(
        model, window[None], max_kl=10.0, candidates=["calibrated-28", "calibrated-12", "transform-30"]
    )
    assert chosen.stats()["chosen_preset"] == "calibrated-12" and chosen.calibration.digest == calibration.digest
    with torch.no_grad():
        model(window[None], past_key_values=chosen)
    assert chosen.stats()["tokens_compressed"] > 0


def test_prediction_knows_the_calibration(model, calibration, window, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    keep(calibration, model)
    cache = create_cache("calibrated-16", model)
    with torch.no_grad():
        model(window[None, :150], past_key_values=cache)
    assert predict_memory(model, "calibrated-16", 150, device="cpu") == cache.memory()


# Cover the prompt alone, then decoded and reread tokens too
@pytest.mark.parametrize("together", [pytest.param(80, marks=pytest.mark.long), 16])
def test_the_package_has_a_calibration_of_smollm2(smollm2, licence_ids, tmp_path, monkeypatch, divergence, together):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    model, _ = smollm2
    cache = packaged_cache("smollm2", model)
    plain = TransformCodingCache(model, nbits=cache.cache_config.key_nbits)
    # A basis and its inverse in bytes, for 30 layers of 3 heads of 64 channels, some without bits
    assert sum(cache.memory().shared.values()) < 1.5e6
    window = licence_ids[0, :160]
    assert divergence(model, cache, window, together) < divergence(model, plain, window, together)


@pytest.mark.long
def test_the_package_has_a_calibration_of_gemma3(gemma3, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    model, _ = gemma3
    # The file is of all 18 layers; shared is what three have, those without a window, each of a head of 256 channels
    assert 0 < sum(packaged_cache("gemma3-270m", model, most=2.6e6).memory().shared.values()) < 0.9e6


def packaged_cache(name, model, most=1.0e6):
    (file,) = Path(module.__file__).parent.glob(f"reference_calibrations/{name}.safetensors")
    assert file.stat().st_size < most
    cache = create_cache("calibrated-12", model)
    assert cache.calibration.digest == TransformCalibration.read(file).digest
    return cache


# Layers of a window: what is asked of them, what they share, and what a file has of them

WINDOW = 80


@pytest.fixture(scope="module")
def hybrid(tiny_model) -> PreTrainedModel:
    """Layers of a window and of full attention in turns."""
    return tiny_model("gemma3-hybrid", seed=0, sliding_window=WINDOW, **SIZES)


@pytest.fixture(scope="module")
def of_hybrid(hybrid: PreTrainedModel, random_windows) -> TransformCalibration:
    return calibrate_transform(hybrid, random_windows(3, 300))


def of_window(calibration: TransformCalibration, seen: int | None) -> TransformCalibration:
    """The layers alone that see so many tokens."""
    layers = [layer for layer in calibration.content.layers if layer.window == seen]
    return TransformCalibration(dataclasses.replace(calibration.content, layers=layers))


def test_layers_of_a_window_are_calibrated(hybrid, of_hybrid, tmp_path):
    assert [layer.window for layer in of_hybrid.layers.values()] == [WINDOW, None, WINDOW, None]
    path = tmp_path / "calibration.safetensors"
    of_hybrid.save(path)
    read = TransformCalibration.load(path, hybrid)
    assert read.digest == of_hybrid.digest
    assert [layer.window for layer in read.layers.values()] == [WINDOW, None, WINDOW, None]
    assert all(
        layer.policy.shared_codec is not None for layer in make_cache(hybrid, read, sliding="compressed").layers
    )


def test_energies_of_windows_do_not_grow_with_the_text(hybrid, random_windows):
    """The cost of an error is that of a token in sight, however long the text before it is."""
    energies = []
    for length in (120, 300):
        # The following tokens are as many
        windows = [each[-length:] for each in random_windows(6, 300)]
        layers = calibrate_transform(hybrid, windows).layers
        energies.append([float(layers[index].values.energies.sum()) for index in (0, 2)])
    for few, many in zip(*energies, strict=True):
        assert 0.4 < many / few < 2.5


@pytest.mark.parametrize("seen", [None, WINDOW], ids=["full", "window"])
def test_layers_share_bytes_with_layers_of_equal_sight(hybrid, of_hybrid, seen):
    """Layers of equal sight hold the requested bytes at every length of a text."""
    own = [index for index, layer in of_hybrid.layers.items() if layer.window == seen]
    alone = of_window(of_hybrid, seen)
    sizes = [
        [each.codec(index, 3.0, rotary_embedding(hybrid.config, index).frequencies).row_sizes for index in own]
        for each in (of_hybrid, alone)
    ]
    assert sizes[0] == sizes[1]
    # A byte of scale, and three bits for each of three blocks of eight components, of keys and values
    assert sum(map(sum, sizes[0])) == len(own) * 2 * (1 + 3 * 3)


def test_calibration_is_nearer_to_dense_than_prompt_statistics(hybrid, of_hybrid, window, divergence):
    full_only = of_window(of_hybrid, None)
    by_all, by_full, by_none = (
        divergence(hybrid, make_cache(hybrid, each, sliding="compressed"), window)
        for each in (of_hybrid, full_only, None)
    )
    assert by_all < min(by_full, by_none) / 2


@pytest.mark.parametrize("length", [60, 290], ids=str)
@torch.no_grad()
def test_a_saved_cache_continues_after_windows_dropped_tokens(hybrid, of_hybrid, window, tmp_path, length):
    cache, path = make_cache(hybrid, of_hybrid, sliding="compressed"), tmp_path / "cache.safetensors"
    hybrid(window[None, : length // 2], past_key_values=cache)
    for position in range(length // 2, length):
        hybrid(window[None, position : position + 1], past_key_values=cache)
    cache.save(path, hybrid)
    loaded = TransformCodingCache.load(path, hybrid, calibration=of_hybrid)
    assert (loaded.layers[0].storage.prefix is None) == (length > WINDOW) and loaded.layers[
        1
    ].storage.prefix is not None
    for position in range(40):
        logits = [
            hybrid(window[None, position : position + 1], past_key_values=each).logits for each in (cache, loaded)
        ]
        assert torch.equal(*logits)


def test_calibrated_kernels_are_compiled_before_the_first_token(hybrid, of_hybrid):
    for each in (of_hybrid, of_window(of_hybrid, None)):
        make_cache(hybrid, each, sliding="compressed").warm_up(hybrid)


# Observation of a text


def test_gradients_of_read_tokens_cover_all_following_tokens(tiny_model, random_windows, monkeypatch):
    model = tiny_model("llama", seed=0, vocab_size=97)
    seen: list[tuple[torch.Tensor, int]] = []
    monkeypatch.setattr(SideSums, "add_gradients", lambda _, gradients, count: seen.append((gradients.clone(), count)))
    (window,) = random_windows(1, 75)
    observe_window(model, window, 37, 4, 1, {}, torch.Generator().manual_seed(0))
    sides = 2 * model.config.num_hidden_layers
    # Four sinks are left out; of 38 tokens behind the prompt 16, 16 and 6 are read together
    assert [(each.shape[1], count) for each, count in seen] == [
        (num_read - 4, count) for num_read, count in ((37, 16), (53, 16), (69, 6)) for _ in range(sides)
    ]
    for gradients, _ in seen:
        assert (gradients.abs().amax(dim=(0, 2)) > 0).all()


def test_window_layers_cost_nothing_beyond_their_window(tiny_model, random_windows, monkeypatch):
    model = tiny_model("gemma3-hybrid", seed=0, sliding_window=24)
    windowed = [index for index, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]
    sums, seen = {}, []
    add = SideSums.add_gradients

    def record(self, gradients, count):
        seen.append((self, gradients.clone()))
        add(self, gradients, count)

    monkeypatch.setattr(SideSums, "add_gradients", record)
    (window,) = random_windows(1, 100)
    observe_window(model, window, 50, 4, 2, sums, torch.Generator().manual_seed(0))
    assert windowed and all((sums[index].window is not None) == (index in windowed) for index in sums)
    for index, own in sums.items():
        assert own.keys.num_scored == own.values.num_scored == 2 * 50
        for gradients in (each for side, each in seen if side in (own.keys, own.values)):
            # The first of those that are read together sees itself and 23 tokens before it
            hidden = gradients[:, : gradients.shape[1] - 23]
            assert (hidden.abs().max() == 0) == (index in windowed)
            assert (gradients[:, -23:].abs().amax(dim=(0, 2)) > 0).all()


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen4_exp_text"])
def test_models_with_indexers_are_calibrated(family: str, random_windows) -> None:
    model = build_family(family)
    (window,) = random_windows(1, 160)
    cache = make_cache(model, calibrate_transform(model, [window]))
    with torch.no_grad():
        model(window[None, :100], **as_argument(cache))
        logits = model(window[None, 100:101], **as_argument(cache)).logits
    assert logits.isfinite().all()
    assert cache.stats()["layers_compressing"] > 0
