"""Prompts at once, in chunks and behind others."""

import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.benchmarks.step import coding_seconds, read_prompt


def test_every_case_has_a_row(rows_of):
    caches = ["dynamic", "kcvt-4bit"]
    options = "--context 130 --new-tokens 17 --chunk 50 --rounds 2"
    rows = rows_of(f"prompts {options} --cache {' --cache '.join(caches)}")
    cases = [("prompt", 0, 130, 130), ("chunks", 0, 130, 50), ("behind", 130, 17, 17)]
    keys = ("what", "context", "new_tokens", "chunk", "cache")
    assert [tuple(row[key] for key in keys) for row in rows] == [(*case, name) for case in cases for name in caches]
    assert all(row["relative_error"] < 0.5 for row in rows)
    assert rows[0]["coding_share"] == 0 < rows[1]["coding_share"]


@torch.no_grad()
def test_timing_restores_methods_of_layers(tiny_llama):
    cache = create_cache("gear-2bit", tiny_llama)
    with coding_seconds(cache) as seconds:
        read_prompt(tiny_llama, cache, torch.zeros(1, 70, dtype=torch.long), 70)
    assert len(seconds) >= 2
    assert not any("commit_prompt" in vars(layer) for layer in cache.layers)


@torch.no_grad()
def test_coding_on_a_gpu_is_timed_to_its_end(tiny_llama, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    cache = create_cache("gear-2bit", tiny_llama)
    with coding_seconds(cache, torch.device("cuda")) as seconds:
        read_prompt(tiny_llama, cache, torch.zeros(1, 70, dtype=torch.long), 70)
    assert len(waited) == 2 * len(seconds)


def test_unmeasurable_cases_are_refused(assert_refused):
    assert_refused("prompts --cache dynamic --context 2990 --new-tokens 17", "3007 are needed")
