"""Prompts at once, in chunks and behind others; and ways to continue one prefix, whose bytes can be told."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.benchmarks import prompts
from kvcache_plugins.eval.benchmarks.prompts import Way, coding_seconds, read, take_ways


PREFIX, COUNT, NEW = 200, 4, 3
# Keys and values of a token, dense, in float32: 2 layers of 2 heads of 32
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
WAYS = f"prefix --prefix {PREFIX} --continuations {COUNT} --new-tokens {NEW}"


def test_rows_of_every_case(rows_of):
    caches = ["dynamic", "kcvt-4bit"]
    options = "--context 130 --new-tokens 17 --chunk 50 --rounds 2"
    rows = rows_of(f"prompts {options} --cache {' --cache '.join(caches)}")
    cases = [("prompt", 0, 130, 130), ("chunks", 0, 130, 50), ("behind", 130, 17, 17)]
    keys = ("what", "context", "new_tokens", "chunk", "cache")
    assert [tuple(row[key] for key in keys) for row in rows] == [(*case, name) for case in cases for name in caches]
    assert all(row["relative_error"] < 0.5 for row in rows)
    assert rows[0]["coding_share"] == 0 < rows[1]["coding_share"]


@torch.no_grad()
def test_layers_are_as_before(tiny_llama):
    cache = create_cache("gear-2bit", tiny_llama)
    with coding_seconds(cache) as seconds:
        read(tiny_llama, cache, torch.zeros(1, 70, dtype=torch.long), 70)
    assert len(seconds) >= 2
    assert not any("settle_prompt" in vars(layer) for layer in cache.layers)


def test_ways_of_a_prefix(rows_of, tiny_llama, text_file):
    rows = rows_of(f"{WAYS} --prefill-rounds 2 --cache gear-k4v3 --cache gear-2bit:rank=2")
    assert [row["way"] for row in rows] == ["prefill again", "deepcopy", *["fork", "load and fork"] * 2]
    again, copies, *forks = rows
    # Nothing is shared: all of them are there as often as there are continuations
    assert again["held_bytes"] == copies["held_bytes"] == COUNT * (PREFIX + NEW) * TOKEN_BYTES
    assert again["kl"] == pytest.approx(0, abs=1e-9) and copies["kl"] == 0
    assert [(row["num_measured"], row["is_extrapolated"]) for row in rows] == [(2, True), *[(COUNT, False)] * 5]
    assert again["all_ready_s"] == pytest.approx(COUNT * again["median_s"])
    assert [list(row["once_s"]) for row in rows[:4]] == [[], ["prefill"], ["prefill"], ["load"]]
    for fork, loaded in zip(forks[::2], forks[1::2], strict=True):
        assert fork["held_bytes"] == loaded["held_bytes"]
        assert 0 < fork["kl"] == pytest.approx(loaded["kl"], rel=1e-3)
        assert fork["file_bytes"] is fork["save_s"] is None and loaded["file_bytes"] > 0 < loaded["save_s"]
    # Forks have the prefix once, and each what came new
    cache = create_cache("gear-k4v3", tiny_llama)
    tokens = torch.tensor([[ord(letter) for letter in text_file.read_text()[: PREFIX + NEW]]])
    held = []
    with torch.no_grad():
        for part in tokens.split(PREFIX, dim=1):
            tiny_llama(part, past_key_values=cache)
            held.append(cache.memory().total_bytes)
    assert forks[0]["held_bytes"] == held[0] + COUNT * (held[1] - held[0])


def test_ways_that_differ_are_an_error(tiny_llama):
    def way(fill):
        def make():
            cache = create_cache("dynamic", tiny_llama)
            with torch.no_grad():
                tiny_llama(torch.full((1, 20), fill), past_key_values=cache)
            return cache

        return Way(name=f"fill {fill}", cache="dynamic", make=make, rounds=1)

    for ways, message in (([way(3), way(4)], "`fill 3` and `fill 4` of `dynamic` differ"), ([way(3)] * 2, "nan")):
        if message == "nan":
            ways[0].logits.append(torch.full((5, 128), torch.nan))
        with torch.no_grad(), pytest.raises(RuntimeError, match=message):
            take_ways(tiny_llama, ways, torch.arange(5, 10)[None])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prompts --cache dynamic --context 2990 --new-tokens 17", "3007 are needed"),
        (f"{WAYS} --cache dynamic", "`cache` has to be a GEAR cache"),
        (f"{WAYS} --cache geer", "Unknown cache `geer`"),
        (f"{WAYS} --prefill-rounds 5", "`prefill_rounds` has to be at most `continuations`, 4, but got 5"),
        (f"{WAYS} --new-tokens 1000", "the text has 3000 tokens, but 4200 are needed"),
    ],
)
def test_what_cannot_be_measured_is_refused(assert_refused, words, message):
    assert_refused(words, message)
    assert prompts.REFERENCE == "dynamic"
