"""Calibration of transform coding: the file, what refuses it, and the cache that is coded by it."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcache_plugins import GEARCache, create_cache, measure_memory
from kvcache_plugins.contract import run_contract
from kvcache_plugins.gear import TransformCalibration, calibrate_transform
from kvcache_plugins.gear.transform.calibrations import calibration_path


ROOT = Path(__file__).resolve().parents[3]


def make_model(seed: int = 0, num_heads: int = 2) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_heads,
        head_dim=20,
        initializer_range=0.2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def make_windows(count: int = 3, length: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (length,), generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> TransformCalibration:
    return calibrate_transform(model, make_windows())


def make_cache(model: PreTrainedModel, calibration: object, nbits: float = 3.0) -> GEARCache:
    return GEARCache(model, backbone="transform", nbits=nbits, calibration=calibration)


@torch.no_grad()
def divergence(model: PreTrainedModel, cache: GEARCache, window: torch.Tensor) -> float:
    """Mean KL to the dense cache of a window's second half."""
    logarithms = []
    for each in (DynamicCache(config=model.config), cache):
        half = window.numel() // 2
        model(window[None, :half], past_key_values=each)
        logarithms.append(model(window[None, half:], past_key_values=each).logits[0].double().log_softmax(dim=-1))
    dense, coded = logarithms
    return float((dense.exp() * (dense - coded)).sum(dim=-1).mean())


def test_a_file_holds_what_was_found(model, calibration, tmp_path):
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    read = TransformCalibration.load(path, model)
    assert (read.config, list(read.layers)) == (calibration.config, [0, 1])
    assert torch.equal(read.weights, calibration.weights)
    assert TransformCalibration.load(path, model) is read and TransformCalibration.load(path, model.config) is read
    for index, layer in calibration.layers.items():
        assert read.layers[index].layout == layer.layout
        for side in ("keys", "values"):
            for part in ("mean", "basis", "energies"):
                assert torch.equal(
                    getattr(getattr(read.layers[index], side), part), getattr(getattr(layer, side), part)
                )
    window = make_windows(4)[3]
    assert divergence(model, make_cache(model, path), window) == divergence(model, make_cache(model, read), window)


def test_another_models_file_is_refused(model, calibration, tmp_path):
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    other, narrower = make_model(1), make_model(0, num_heads=1)
    for refused, given in ((other, path), (other, calibration), (narrower, path), (narrower.config, path)):
        with pytest.raises(ValueError, match="`calibration`.*another"):
            make_cache(refused, given)
    with pytest.raises(ValueError, match="needs `config`"):
        GEARCache(backbone="transform", calibration=path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="`calibration`"):
        make_cache(model, path)


def test_any_dtype_will_do(model, calibration):
    for dtype in (torch.bfloat16, torch.float16):
        assert calibration.mismatch(copy.deepcopy(model).to(dtype)) is None


def test_states_of_another_model_are_refused(model, calibration):
    cache = make_cache(model.config, calibration)
    with pytest.raises(ValueError, match="`calibration` is of 2 heads of 20 in layer 0, but got 2 of 24"):
        cache.update(torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 20), 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backbone": "kivi"}, "backbone"),
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
        GEARCache(model, **{"backbone": "transform", "calibration": calibration, **options})


def test_windows_have_to_be_there_and_long_enough(model):
    for windows in ([], make_windows(1, 20)):
        with pytest.raises(ValueError, match="`windows` has to hold one window"):
            calibrate_transform(model, windows)


@pytest.mark.parametrize("nbits", [1.0, 2.5, 4.0])
def test_bytes_are_what_was_asked_for(model, calibration, nbits):
    cache, length, sinks = make_cache(model, calibration, nbits), 150, 4
    with torch.no_grad():
        model(make_windows(1)[0][None, :length], past_key_values=cache)
    codes = measure_memory(cache).parts["codes"]
    # Three blocks of eight for twenty channels, and a byte of scale; a head cannot have parts of a byte
    num_rows = (length - sinks) * 2 * 2 * 2
    assert 0 <= num_rows * (1 + 3 * nbits) - codes <= (length - sinks) * 2
    assert cache.stats()["calibration_bytes"] > 0
    assert copy.deepcopy(cache).layers[0].coder.tables is cache.layers[0].coder.tables


def test_more_bits_and_a_calibration_bring_it_nearer_to_dense(model, calibration):
    window = make_windows(4)[3]
    few, some, many = (divergence(model, make_cache(model, calibration, nbits), window) for nbits in (1.5, 3.0, 6.0))
    assert many < some / 4 < few / 16
    plain = divergence(model, GEARCache(model, backbone="transform", nbits=3.0), window)
    assert some < plain


@pytest.mark.parametrize("kernel", [pytest.param("torch", marks=pytest.mark.long), "compiled"])
def test_contract(model, calibration, monkeypatch, kernel):
    if kernel == "compiled":
        pytest.importorskip("numba")
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
    failed = [
        f"{result.name}: {result.detail}"
        for result in run_contract(model, lambda: make_cache(model, calibration))
        if result.status == "fail"
    ]
    assert not failed


def test_a_preset_finds_the_models_own_calibration(model, calibration, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="has no calibration"):
        assert create_cache("gear-c16", model).calibration is None
    path = calibration_path(model)
    assert Path(tmp_path) in path.parents
    path.parent.mkdir(parents=True)
    calibration.save(path)
    assert torch.equal(create_cache("gear-c16", model).calibration.weights, calibration.weights)
    with pytest.warns(UserWarning, match="has no calibration"):
        assert create_cache("gear-c16", make_model(1)).calibration is None
    path.write_bytes(b"no calibration")
    with pytest.raises(ValueError, match="`calibration`"):
        create_cache("gear-c16", model)


def test_save_is_refused(model, calibration, tmp_path):
    with pytest.raises(NotImplementedError, match="not supported yet"):
        make_cache(model, calibration).save(tmp_path / "cache", model)


@pytest.mark.long
@pytest.mark.slow
def test_a_real_models_calibration_carries_over_to_another_text(smollm2):
    """At the same bits the KL is far from what it is where prompts alone say how they are coded."""
    model, tokenizer = smollm2
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("LICENSE", "README.md")]
    known, other = (tokenizer(text, return_tensors="pt").input_ids[0] for text in texts)
    calibrated = calibrate_transform(model, list(known[:1000].split(500)), num_draws=1)
    window = other[:400]
    coded = divergence(model, make_cache(model, calibrated, 2.25), window)
    plain = divergence(model, GEARCache(model, backbone="transform", nbits=2.25), window)
    assert 0 < coded < 0.75 * plain
