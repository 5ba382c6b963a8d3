"""`bench prompts`: prompts at once, in chunks and behind others have their rows, and what coding takes is counted."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache_plugins import create_cache
from kvcache_plugins.console.results import with_results
from kvcache_plugins.eval.benchmarks import prompts


command = with_results(prompts.benchmark_prompts)


@pytest.fixture
def network():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32, vocab_size=64
    )
    return LlamaForCausalLM(config).eval()


class Words:
    """Stands for a tokenizer: a token a character."""

    def __call__(self, text, return_tensors):
        self.input_ids = torch.tensor([[ord(character) % 64 for character in text]])
        return self


OPTIONS = {"model": "m", "context": 130, "new_tokens": [17], "chunk": [50], "rounds": 2, "dtype": None}


def test_rows_of_every_case(network, monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "load_for_evaluation", lambda model, dtype: (network, Words()))
    (tmp_path / "text.txt").write_text("As any text would do. " * 20, encoding="utf-8")
    out = tmp_path / "prompts.json"
    caches = ["dynamic", "kcvt-4bit"]
    command(**OPTIONS, cache=caches, text_file=tmp_path / "text.txt", num_threads=None, out=out)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    cases = [("prompt", 0, 130, 130), ("chunks", 0, 130, 50), ("behind", 130, 17, 17)]
    assert [(row["what"], row["context"], row["new_tokens"], row["chunk"], row["cache"]) for row in rows] == [
        (*case, name) for case in cases for name in caches
    ]
    for row in rows:
        assert row["relative_error"] < 0.5
        assert row["coding_share"] == 0 if row["cache"] == "dynamic" else row["coding_share"] >= 0
    assert rows[1]["coding_share"] > 0


def test_too_short_a_text_is_refused(network, monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "load_for_evaluation", lambda model, dtype: (network, Words()))
    (tmp_path / "text.txt").write_text("Short", encoding="utf-8")
    with pytest.raises(ValueError, match="147 are needed"):
        prompts.benchmark_prompts(**OPTIONS, cache=["dynamic"], text_file=tmp_path / "text.txt", num_threads=None)


@torch.no_grad()
def test_layers_are_as_before(network):
    cache = create_cache("gear-2bit", network)
    with prompts.coding_seconds(cache) as seconds:
        prompts.read(network, cache, torch.zeros(1, 70, dtype=torch.long), 70)
    assert len(seconds) >= 2
    assert not any("settle_prompt" in vars(layer) for layer in cache.layers)
