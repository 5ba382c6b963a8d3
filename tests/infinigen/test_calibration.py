"""Calibration: what it measures, what it fits, and the file that it writes."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.infinigen import Calibration, calibrate


def make_model(seed: int = 0) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def make_windows(count: int = 6, length: int = 400) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (length,), generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> Calibration:
    return calibrate(model, make_windows(), rank=48, min_recall=0.1)


def test_corrections_bring_the_guess_nearer_to_the_truth(calibration: Calibration) -> None:
    """Layers of random weights have little to do with each other: what can be told is told by the correction."""
    assert [report.layer_idx for report in calibration.reports] == [1, 2]
    for report in calibration.reports:
        assert 0.1 < report.by_input < report.oracle < 1
        assert report.choice == "corrected"
        assert report.corrected > report.by_stream + 0.002
        assert report.recall == report.corrected / report.oracle


def test_bad_layers_stay_whole(model: PreTrainedModel) -> None:
    strict = calibrate(model, make_windows(2), rank=0, min_recall=1.0)
    assert strict.full_layers == (1, 2)
    assert strict.corrections == {}
    with pytest.raises(ValueError, match="nothing is left"):
        InfiniGenCache(model, calibration=strict)


def test_cache_uses_the_corrections(model: PreTrainedModel, calibration: Calibration) -> None:
    prompt, steps = (window[None, :length] for window, length in zip(make_windows(2), (400, 8), strict=True))
    shares = {}
    for given in (None, calibration):
        with (
            InfiniGenCache(model, share=0.1, full_layers=(0,), track_hits=True, calibration=given) as cache,
            torch.no_grad(),
        ):
            model(prompt, past_key_values=cache)
            for step in steps.split(1, dim=1):
                model(step, past_key_values=cache)
        stats = cache.stats()
        shares[given is calibration] = stats["hits"] / stats["hits_possible"]
    assert shares[True] > shares[False] + 0.05
    corrections = sum(tensor.nbytes for factors in calibration.corrections.values() for tensor in factors)
    assert cache.memory().parts["correction"] == corrections > 0


def test_file_keeps_everything(model: PreTrainedModel, calibration: Calibration, tmp_path) -> None:
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    loaded = Calibration.load(path, model)
    assert loaded.reports == calibration.reports
    for index, factors in calibration.corrections.items():
        for read, written in zip(loaded.corrections[index], factors, strict=True):
            assert torch.equal(read, written)
    InfiniGenCache(model, calibration=path).detach()


def test_file_of_another_model_is_refused(calibration: Calibration, tmp_path) -> None:
    path = tmp_path / "calibration.safetensors"
    calibration.save(path)
    with pytest.raises(ValueError, match="another model"):
        InfiniGenCache(make_model(seed=1), calibration=path)


def test_other_files_are_refused(model: PreTrainedModel, tmp_path) -> None:
    damaged, other = tmp_path / "damaged", tmp_path / "other"
    damaged.write_bytes(b"no safetensors")
    save_file({"weight": torch.zeros(2)}, str(other))
    for path, message in ((damaged, "damaged"), (other, "format"), (tmp_path / "missing", "no file")):
        with pytest.raises(ValueError, match=f"`calibration`.*{message}"):
            Calibration.load(path, model)


def test_too_little_text_is_refused(model: PreTrainedModel) -> None:
    for windows in (make_windows(1), make_windows(2, length=100)):
        with pytest.raises(ValueError, match="`windows`"):
            calibrate(model, windows)
