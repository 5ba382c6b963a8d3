"""Repetition: shares of distinct 4-grams, lengths to the end token, and the same text through an exact cache."""

import json
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins.eval.measures.repetition import distinct_share, measure_repetition


def test_repeated_grams_are_counted_once():
    assert distinct_share([1, 2, 3]) == 1.0
    assert distinct_share(list(range(20))) == 1.0
    # Four of the 17 4-grams are distinct
    assert distinct_share([1, 2, 3, 4] * 5) == pytest.approx(4 / 17)


def test_texts_stop_behind_their_end_token(tiny_llama):
    prompts = torch.randint(2, 128, (3, 12))
    factories = {"dense": partial(DynamicCache, config=tiny_llama.config), "again": DynamicCache}
    # A random model ends a text soon if a tenth of its vocabulary does
    tiny_llama.generation_config.eos_token_id = list(range(12))
    first, second = measure_repetition(tiny_llama, prompts, factories, 64, seed=3)
    assert first | {"cache": "again"} == second
    assert 0 < first["ended"] <= 3
    assert all(1 <= length <= 64 for length in first["lengths"])
    assert len(first["distinct"]) == len(first["lengths"]) == 3
    assert min(first["lengths"]) < 64
    tiny_llama.generation_config.eos_token_id = None
    (endless,) = measure_repetition(tiny_llama, prompts, {"dense": DynamicCache}, 16)
    assert endless["lengths"] == [16, 16, 16]
    assert endless["ended"] == 0


@pytest.mark.slow
def test_command_compares_caches_with_the_dense_one(smollm2, tmp_path, monkeypatch, run):
    monkeypatch.setattr("kvcache_plugins.console.inputs.load_for_evaluation", lambda *_: smollm2)
    text_file, out = tmp_path / "text.txt", tmp_path / "out.json"
    text_file.write_text("The ship sailed on through the night, and nobody saw the light. " * 40, encoding="utf-8")
    words = [
        "eval",
        "repetition",
        "--text-file",
        str(text_file),
        "--windows",
        "2",
        "--prefix",
        "128",
        "--tokens",
        "24",
    ]
    result = run(*words, "--cache", "transform", "--out", str(out))
    assert "distinct" in result.stdout
    dense, own = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (dense["cache"], own["cache"]) == ("dynamic", "transform")
    assert 0 < own["memory_at_end"]["kv_percent"] < dense["memory_at_end"]["kv_percent"]
    assert 0 < dense["least_distinct"] <= dense["mean_distinct"] <= 1
