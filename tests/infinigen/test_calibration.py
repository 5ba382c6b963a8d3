"""Calibration: its measurements, its corrections, and its file."""

from pathlib import Path

import pytest
import torch
from decoding import TENTH
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.eval.observers import HitCounter
from kvcache_plugins.files.records import read_content, write_tensors
from kvcache_plugins.infinigen import Calibration, calibrate
from kvcache_plugins.infinigen.calibration import FORMAT


SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}


@pytest.fixture(scope="module")
def model(tiny_model) -> PreTrainedModel:
    return tiny_model("llama", seed=0, **SIZES)


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel, random_windows) -> Calibration:
    return calibrate(model, random_windows(6, 400), rank=48, min_recall=0.1)


@pytest.fixture
def path(calibration: Calibration, tmp_path) -> Path:
    calibration.save(tmp_path / "calibration.safetensors")
    return tmp_path / "calibration.safetensors"


def test_corrections_improve_the_prediction(calibration: Calibration) -> None:
    """Layers of random weights predict each other badly; the correction is what helps."""
    assert [report.layer_idx for report in calibration.reports] == [1, 2]
    for report in calibration.reports:
        assert 0.1 < report.by_input < report.oracle < 1
        assert report.choice == "corrected"
        assert report.corrected > report.by_stream + 0.002
        assert report.recall == report.corrected / report.oracle


def test_layers_with_bad_predictions_fetch_everything(model: PreTrainedModel, random_windows) -> None:
    strict = calibrate(model, random_windows(2, 400), rank=0, min_recall=1.0)
    assert strict.full_layers == (1, 2)
    assert strict.corrections == {}
    with pytest.raises(ValueError, match="nothing is left"):
        InfiniGenCache(model, calibration=strict)


def test_cache_uses_the_corrections(model: PreTrainedModel, calibration: Calibration, random_windows) -> None:
    prompt, steps = (window[None, :length] for window, length in zip(random_windows(2, 400), (400, 8), strict=True))
    shares = {}
    for given in (None, calibration):
        with (
            InfiniGenCache(model, **TENTH, full_layers=(0,), speculate=True, calibration=given) as cache,
            torch.no_grad(),
        ):
            counter = HitCounter(cache)
            model(prompt, past_key_values=cache)
            for step in steps.split(1, dim=1):
                model(step, past_key_values=cache)
        shares[given is calibration] = counter.hits / counter.possible
    assert shares[True] > shares[False] + 0.05
    corrections = sum(tensor.nbytes for factors in calibration.corrections.values() for tensor in factors)
    assert cache.memory().parts["correction"] == corrections > 0


def test_file_keeps_everything(model: PreTrainedModel, calibration: Calibration, path: Path) -> None:
    loaded = Calibration.load(path, model)
    assert loaded.reports == calibration.reports
    for index, factors in calibration.corrections.items():
        for read, written in zip(loaded.corrections[index], factors, strict=True):
            assert torch.equal(read, written)
    InfiniGenCache(model, calibration=path).detach()


def test_file_of_another_model_is_refused(tiny_model, path: Path) -> None:
    with pytest.raises(ValueError, match="another model"):
        InfiniGenCache(tiny_model("llama", seed=1, **SIZES), calibration=path)


def forged_factors(change):
    """Change the factors of the first correction."""

    def forge(content, tensors) -> None:
        names = "corrections.0.down", "corrections.0.up"
        tensors |= dict(zip(names, (each.contiguous() for each in change(*map(tensors.get, names))), strict=True))

    return forge


FORGED = {
    "has layer 99": lambda content, tensors: content["reports"][0].update(layer_idx=99),
    "oracle": lambda content, tensors: content["reports"][0].update(oracle=0),
    "by_input": lambda content, tensors: content["reports"][0].update(by_input=3),
    "choice": lambda content, tensors: content["reports"][0].update(choice="more"),
    "unknown": lambda content, tensors: content["reports"][0].update(more=1),
    "finite number": lambda content, tensors: content["reports"][0].update(corrected="x"),
    "shape": forged_factors(lambda down, up: (down[1:], up)),
    "of shape": forged_factors(lambda down, up: (down, up[1:])),
    "torch.int32": forged_factors(lambda down, up: (down.int(), up.int())),
    "finite": forged_factors(lambda down, up: (down * torch.inf, up)),
    "channels": forged_factors(lambda down, up: (down[1:], up[:, 1:])),
    "one dtype": forged_factors(lambda down, up: (down.double(), up)),
    "corrections.77.down` is unknown": lambda content, tensors: tensors.update(
        {"corrections.77.down": tensors["corrections.0.down"].clone()}
    ),
    "have to be of layers": lambda content, tensors: content["corrections"][0].update(layer_idx=0),
}


@pytest.mark.parametrize("message", FORGED)
def test_forged_files_are_refused(model: PreTrainedModel, path: Path, message: str) -> None:
    content, tensors = read_content(path, FORMAT), load_file(path)
    FORGED[message](content, tensors)
    write_tensors(path, FORMAT.stamp(content), tensors)
    with pytest.raises(ValueError, match=f"`calibration`: {path} is damaged: .*{message}"):
        Calibration.load(path, model)


def test_damaged_and_foreign_files_are_refused(model: PreTrainedModel, tmp_path) -> None:
    damaged, other = tmp_path / "damaged", tmp_path / "other"
    damaged.write_bytes(b"no safetensors")
    save_file({"weight": torch.zeros(2)}, str(other))
    for path, message in ((damaged, "damaged"), (other, "none that this"), (tmp_path / "missing", "no file")):
        with pytest.raises(ValueError, match=f"`calibration`.*{message}"):
            Calibration.load(path, model)


def test_too_little_text_is_refused(model: PreTrainedModel, random_windows) -> None:
    for windows in (random_windows(1, 400), random_windows(2, 100)):
        with pytest.raises(ValueError, match="`windows`"):
            calibrate(model, windows)
