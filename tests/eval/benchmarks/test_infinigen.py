"""The benchmark of InfiniGen's parts, on a tiny model."""

import json

import torch

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.console.results import with_results
from kvcache_plugins.eval.benchmarks import infinigen as benchmark_infinigen
from kvcache_plugins.infinigen.layer import InfiniGenLayer


command = with_results(benchmark_infinigen.benchmark_infinigen)


def test_parts_add_up_to_the_step(tiny_model) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    token_ids = torch.randint(3, 128, (1, 300))
    with InfiniGenCache(model, speculate=True) as cache, torch.inference_mode():
        model(token_ids, past_key_values=cache)
        start_fetch = InfiniGenLayer._start_fetch
        parts = benchmark_infinigen.time_parts(lambda number: model(token_ids[:, :1], past_key_values=cache), 5)
    assert list(parts) == ["expected queries", "scoring", "choosing", "fetching and attention", "the model"]
    assert all(seconds > 0 for seconds in parts.values())
    assert cache.stats()["speculated_calls"] == 5
    # What was wrapped is what it was
    assert InfiniGenLayer._start_fetch is start_fetch


def test_writes_rows(tiny_model, tmp_path, monkeypatch) -> None:
    model = tiny_model("llama", num_hidden_layers=3)

    class Tokens:
        input_ids = torch.randint(3, 128, (1, 300))

    monkeypatch.setattr(
        benchmark_infinigen, "load_for_evaluation", lambda name: (model, lambda text, return_tensors: Tokens)
    )
    (tmp_path / "text.txt").write_text("text", encoding="utf-8")
    command(
        text_file=tmp_path / "text.txt",
        cache=["dynamic", "infinigen:share=0.1"],
        context=250,
        steps=5,
        out=tmp_path / "result.json",
    )
    content = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    dynamic, infinigen = content["rows"]
    assert (dynamic["cache"], dynamic["speed_against_first"]) == ("dynamic", 1.0)
    assert infinigen["stats"]["selected_calls"] == 5
    assert sum(infinigen["parts_s"].values()) > 0
    assert "parts_s" not in dynamic
