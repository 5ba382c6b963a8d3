"""Fidelity: nothing for the dense cache against itself, more for worse caches, and no way around the cache."""

import json
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, QuantizedCache
from transformers.cache_utils import DynamicLayer

from kvcache_plugins import create_cache
from kvcache_plugins.console import inputs
from kvcache_plugins.eval.inexact_cache import InexactCache
from kvcache_plugins.eval.measures.fidelity import (
    WindowScore,
    continuation_logits,
    fill_cache,
    measure_fidelity,
    measure_perplexity,
    score_text,
    trend,
)
from kvcache_plugins.eval.measures.norms import norms_by_stretch
from kvcache_plugins.registry import describe_caches


Reference = tuple[PreTrainedModel, PreTrainedTokenizerBase]
PREFIX, SCORED = 96, 40


class NoisyLayer(DynamicLayer):
    """Hands out exact states once and keeps noisy ones, as a lossy cache does."""

    noise = 0.0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states)
        self.keys = keys.clone()
        self.keys[..., -key_states.shape[-2] :, :] += self.noise * torch.randn_like(key_states)
        return keys, values


class ShrinkingLayer(DynamicLayer):
    """Keeps and returns keys of .9 of their norm."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(0.9 * key_states, value_states)


def noisy_cache(noise: float) -> Cache:
    layer_class = type("NoisyLayer", (NoisyLayer,), {"noise": noise})
    return Cache(layer_class_to_replicate=layer_class)


class ForgetfulCache(DynamicCache):
    """Claims to hold nothing, as a cache that the model never went through would."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@pytest.fixture
def windows() -> list[torch.Tensor]:
    return [torch.randint(2, 128, (PREFIX + SCORED + 1,)) for _ in range(2)]


def test_dense_against_itself_is_exact(tiny_llama, tiny_model, windows):
    # A hybrid model through a cache with windows
    hybrid = tiny_model("gemma3-hybrid")
    factories = {"dense": lambda: DynamicCache(config=hybrid.config)}
    assert measure_fidelity(hybrid, windows, factories, prefix_length=PREFIX)["dense"].kl == 0
    factories = {"dense": lambda: DynamicCache(config=tiny_llama.config)}
    result = measure_fidelity(tiny_llama, windows, factories, prefix_length=PREFIX)["dense"]
    assert result.kl == 0
    assert result.ppl_ratio == 1
    assert result.top1_agreement == 1
    assert result.kl_spread == result.ppl_ratio_spread == 0
    assert result.num_scored == 2 * SCORED
    assert result.memory_after_prefix.num_values == 2 * 2 * 2 * 32 * PREFIX
    assert result.memory_at_end.num_values == 2 * 2 * 2 * 32 * (PREFIX + SCORED)


def test_perplexity_equals_one_plain_forward(tiny_llama: PreTrainedModel, windows: list[torch.Tensor]) -> None:
    result = measure_fidelity(tiny_llama, windows, {"dense": DynamicCache}, prefix_length=PREFIX)["dense"]
    nll = 0.0
    for window in windows:
        with torch.no_grad():
            logits = tiny_llama(window[None]).logits[0, PREFIX:-1]
        nll += F.cross_entropy(logits, window[PREFIX + 1 :], reduction="sum").item()
    assert result.ppl == pytest.approx(math.exp(nll / (2 * SCORED)), rel=1e-5)


def test_more_noise_has_larger_kl(tiny_llama: PreTrainedModel, windows: list[torch.Tensor]) -> None:
    factories = {f"{noise}": lambda noise=noise: noisy_cache(noise) for noise in (0.0, 0.02, 0.5)}
    results = measure_fidelity(tiny_llama, windows, factories, prefix_length=PREFIX)
    assert results["0.0"].kl == 0
    assert 0 < results["0.02"].kl < results["0.5"].kl
    assert results["0.02"].top1_agreement > results["0.5"].top1_agreement
    assert results["0.5"].ppl_ratio != 1
    assert results["0.5"].kl_spread > 0
    # Half of all positions are below the median, and nearly all below the last percentile
    assert 0 < results["0.5"].kl_median < results["0.5"].kl < results["0.5"].kl_p999


def test_kl_trend_covers_positions_of_all_windows() -> None:
    kls = [(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0)]
    windows = [
        WindowScore(num_scored=8, nll=0, dense_nll=0, kl=sum(each), num_agreeing=0, position_kl=each) for each in kls
    ]
    found = trend(windows, 3)
    assert found["kl_by_stretch"] == [3.0, 6.0, 8.5]
    assert found["kl_per_1000_tokens"] == pytest.approx(1000)
    # Quarters are two tokens each: 2.5 and 8.5
    assert found["kl_last_to_first_quarter"] == pytest.approx(3.4)


def test_norms_of_states_are_compared_by_age(tiny_model):
    """Keys of .9 of their norm, a dense cache, one that evicts, one with hooks, and a model of windows."""
    llama, hybrid = tiny_model("llama"), tiny_model("gemma3-hybrid")
    windows = [torch.randint(2, 100, (PREFIX + SCORED + 1,)) for _ in range(2)]
    factories = {
        "dense": partial(DynamicCache, config=llama.config),
        "shrunk": partial(Cache, layer_class_to_replicate=ShrinkingLayer),
        "h2o": partial(create_cache, "h2o:heavy_ratio=0.2,recent_ratio=0.2", llama),
        "infinigen": partial(create_cache, "infinigen", llama),
        "transform": partial(create_cache, "transform", llama),
    }
    options = {"prefix_length": PREFIX, "chunk": 4, "with_norms": True}
    found = measure_fidelity(llama, windows, factories, **options)
    assert found["dense"].norms == ((1.0,) * (PREFIX + SCORED),) * 2
    assert found["h2o"].norms is None
    shrunk = norms_by_stretch(found["shrunk"].norms, 100)
    assert shrunk["key_norm_by_stretch"] == pytest.approx([0.9, 0.9], abs=0.02)
    assert shrunk["value_norm_by_stretch"] == pytest.approx([1.0, 1.0], abs=0.02)
    # Both hold what the model made; old tokens are packed in one of them
    for name in ("infinigen", "transform"):
        for ratios in norms_by_stretch(found[name].norms, 100).values():
            assert ratios == pytest.approx([1.0, 1.0], abs=0.02), name
    assert norms_by_stretch(found["transform"].norms, 100)["value_norm_by_stretch"][0] != 1.0
    factories = {"dense": partial(DynamicCache, config=hybrid.config)}
    hybrid_norms = measure_fidelity(hybrid, windows, factories, **options)["dense"].norms
    assert hybrid_norms.keys == (1.0,) * (PREFIX + SCORED)


def test_quantized_cache_cannot_score_zero_by_handing_out_exact_states(tiny_llama, windows):
    if not describe_caches("fp8")[0].is_available:
        pytest.skip("this Transformers has no quantized cache without further packages")

    def create() -> Cache:
        return QuantizedCache("fp8", tiny_llama.config)

    # The trap: in one forward over an empty cache its first update returns what it was given
    with torch.no_grad():
        dense = tiny_llama(windows[0][None]).logits
        bypassed = tiny_llama(windows[0][None], past_key_values=create()).logits
    assert torch.equal(dense, bypassed)
    assert measure_fidelity(tiny_llama, windows, {"fp8": create}, prefix_length=PREFIX)["fp8"].kl > 1e-6


def test_chunks_change_only_states_read_from_the_cache(tiny_llama, windows):
    factories = {"dense": DynamicCache, "noisy": lambda: noisy_cache(0.3)}
    whole = measure_fidelity(tiny_llama, windows, factories, prefix_length=PREFIX)
    decoded = measure_fidelity(tiny_llama, windows, factories, prefix_length=PREFIX, chunk=1)
    assert decoded["dense"].kl == 0
    assert decoded["dense"].ppl == pytest.approx(whole["dense"].ppl, rel=1e-4)
    assert decoded["noisy"].kl > whole["noisy"].kl
    # Bytes are measured after each token
    assert whole["dense"].mean_kv_percent is None
    assert decoded["dense"].mean_kv_percent == pytest.approx(200.0)
    with pytest.raises(ValueError, match="`chunk` has to be an integer of at least 1 or None but got"):
        measure_fidelity(tiny_llama, windows, factories, prefix_length=PREFIX, chunk=0)


@pytest.mark.parametrize("chunk", [None, 1])
def test_windows_side_by_side_score_as_each_alone(tiny_llama, windows, chunk):
    factories = {"coded": lambda: create_cache("gear-2bit", tiny_llama)}
    windows.append(windows[0])
    alone, together = (
        measure_fidelity(tiny_llama, windows, factories, prefix_length=PREFIX, chunk=chunk, batch=batch)["coded"]
        for batch in (1, 2)
    )
    assert alone.kl > 1e-6
    assert [each.kl for each in together.windows] == pytest.approx([each.kl for each in alone.windows], rel=1e-3)
    assert [each.nll for each in together.windows] == pytest.approx([each.nll for each in alone.windows], rel=1e-4)
    assert together.mean_kv_percent == pytest.approx(alone.mean_kv_percent)


def test_dense_logits_are_computed_once_a_window(tiny_llama: PreTrainedModel, windows: list[torch.Tensor]) -> None:
    forwards = []
    handle = tiny_llama.register_forward_hook(lambda *_: forwards.append(1))
    measure_fidelity(tiny_llama, windows, dict.fromkeys("abc", DynamicCache), prefix_length=PREFIX)
    handle.remove()
    assert len(forwards) == len(windows) * 2 * (1 + 3)


def test_unscorable_inputs_are_errors(tiny_llama: PreTrainedModel, windows: list[torch.Tensor]) -> None:
    used = DynamicCache()
    fill_cache(tiny_llama, windows[0], used)
    for factory, prefix_length, kind, message in (
        (ForgetfulCache, PREFIX, RuntimeError, "ForgetfulCache reports 0 tokens after 96"),
        (lambda: used, PREFIX, ValueError, "fresh, empty cache"),
        (DynamicCache, 0, ValueError, "leaves nothing to score"),
        (DynamicCache, PREFIX + SCORED, ValueError, "leaves nothing to score"),
    ):
        with pytest.raises(kind, match=message):
            measure_fidelity(tiny_llama, windows, {"mine": factory}, prefix_length=prefix_length)
    with pytest.raises(ValueError, match="The cache is empty"):
        continuation_logits(tiny_llama, windows[0], DynamicCache())


def test_command_writes_rows_with_their_provenance(smollm2, shared_data, tmp_path, monkeypatch, run) -> None:
    monkeypatch.setattr(inputs, "load_for_evaluation", lambda *_: smollm2)
    text_file = tmp_path / "text.txt"
    text_file.write_text((shared_data / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")[:6000])
    out = tmp_path / "results" / "out.json"
    settings = {"windows": 2, "prefix": 192, "scored": 32, "stretch": 12}
    arguments = ["eval", "fidelity", "--text-file", str(text_file), "--out", str(out)]
    for name, value in settings.items():
        arguments += [f"--{name}", str(value)]
    caches = ["gear-4bit", "per-token-2bit", "gear-2bit", "gear-2bit:sparsity=0", "dynamic"]
    for cache in caches:
        arguments += ["--cache", cache]
    shown = run(*arguments).stdout
    assert all(cache in shown for cache in caches)

    content = json.loads(out.read_text())
    assert {"benchmark", "commit", "date", "device", "versions", "settings", "rows"} == set(content)
    assert {"python", "torch", "transformers", "kvcache_plugins"} == set(content["versions"])
    assert content["settings"].items() >= {**settings, "dtype": "float32"}.items()
    sizes = [row["memory_after_prefix"]["total_bytes"] for row in content["rows"]]
    assert sizes == sorted(sizes)
    rows = {row["cache"]: row for row in content["rows"]}
    assert rows["dynamic"]["kl"] == 0
    assert rows["gear-4bit"]["kl"] < rows["gear-2bit"]["kl"] < rows["per-token-2bit"]["kl"]
    assert rows["gear-2bit"]["num_scored"] == 64
    assert 0 < rows["gear-2bit"]["kl_median"] < rows["gear-2bit"]["kl_p999"]
    assert len(rows["gear-2bit"]["windows"]) == 2
    # Stretches of 12, 12 and 8 tokens of both windows: together they are the mean
    first, second, third = rows["gear-2bit"]["kl_by_stretch"]
    assert (12 * first + 12 * second + 8 * third) / 32 == pytest.approx(rows["gear-2bit"]["kl"])
    assert rows["dynamic"]["kl_by_stretch"] == [0, 0, 0]
    assert rows["dynamic"]["kl_last_to_first_quarter"] is None
    assert rows["gear-2bit"]["stats"]["tokens_compressed"] > 0

    # Text that the model itself has written is likelier to it than text of people
    run(*arguments[:12], "--own", "--batch", "2", "--cache", "transform")
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["num_scored"], len(row["windows"])) == (64, 2)
    assert row["kl"] > 0
    assert row["dense_ppl"] < 0.7 * rows["gear-2bit"]["dense_ppl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-file", __file__, "--cache", "dynamic", "--windows", "10000"], "ask for fewer or shorter windows"),
        (["--text-file", __file__, "--cache", "dynamic", "--scored", "3", "--stretch", "1"], "at least 4 tokens"),
    ],
)
def test_command_errors_are_one_line(arguments, message, smollm2, monkeypatch, run, refuse) -> None:
    monkeypatch.setattr(inputs, "load_for_evaluation", lambda *_: smollm2)
    words = "eval", "fidelity", "--prefix", "32", "--scored", "8", *arguments
    refuse(message, *words)
    assert run(*words, code=2).stderr.count("\n") == 1


def draw(length: int) -> torch.Tensor:
    return torch.randint(2, 128, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_perplexity_of_the_dense_cache_equals_one_forward(tiny_llama: PreTrainedModel, chunk: int) -> None:
    windows = [draw(91), draw(181)[90:]]
    factory = partial(DynamicCache, config=tiny_llama.config)
    (row,) = measure_perplexity(tiny_llama, windows, {"dense": factory}, chunk=chunk, stretch=40)
    with torch.no_grad():
        losses = [
            F.cross_entropy(tiny_llama(window[None, :-1]).logits[0].double(), window[1:], reduction="none")
            for window in windows
        ]
    assert row["num_scored"] == 90
    expected = torch.stack(losses)
    assert row["ppl"] == pytest.approx(math.exp(expected.mean()), rel=1e-5)
    by_stretch = [math.exp(part.mean()) for part in expected.split(40, dim=1)]
    assert row["ppl_by_stretch"] == pytest.approx(by_stretch, rel=1e-5)
    assert len(by_stretch) == 3
    sums = [value for part in expected.split(40, dim=1) for value in part.sum(dim=1).tolist()]
    assert sorted(value for window in row["nll"] for value in window) == pytest.approx(sorted(sums), rel=1e-5)
    assert row["memory_at_end"]["total_bytes"] > 0


def test_perplexity_of_a_lossy_cache_drifts(tiny_llama: PreTrainedModel) -> None:
    factories = {name: partial(create_cache, name, tiny_llama) for name in ("dynamic", "kivi-2bit")}
    announced: list[str] = []
    dense, lossy = measure_perplexity(tiny_llama, [draw(200)], factories, chunk=8, on_progress=announced.append)
    assert abs(lossy["ppl"] - dense["ppl"]) > 1e-2
    assert lossy["stats"]["tokens_compressed"] > 0
    assert announced == ["dynamic, window 1 of 1", "kivi-2bit, window 1 of 1"]


def test_perplexity_of_unscorable_inputs_is_an_error(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`chunk` has to be an integer of at least 1 but got 0"):
        list(measure_perplexity(tiny_llama, [draw(9)], {}, chunk=0))
    cache = DynamicCache(config=tiny_llama.config)
    score_text(tiny_llama, draw(9), cache, 1)
    with pytest.raises(ValueError, match="fresh, empty cache"):
        score_text(tiny_llama, draw(9), cache, 1)


def test_random_errors_of_fewer_bits_are_farther_off(tiny_llama, windows):
    factories = {nbits: partial(InexactCache, tiny_llama, key_nbits=nbits, value_nbits=nbits) for nbits in (8, 3)}
    results = measure_fidelity(tiny_llama, windows, factories, prefix_length=PREFIX)
    assert 0 < results[8].kl < results[3].kl / 100
