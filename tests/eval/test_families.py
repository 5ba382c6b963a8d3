"""The table of families is true: right caches work on families that people use, and ways of being wrong have words.

Of families that people use one of each kind is here, all are in `make test-long`.
"""

import os
import signal
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins import GEARCache
from kvcache_plugins.eval import families as survey
from kvcache_plugins.eval.families import (
    Case,
    build_family,
    cases_of,
    family_names,
    generate,
    own_cases,
    prompt,
    try_families,
    try_family,
)
from kvcache_plugins.eval.tables import render_families


USED = [
    *("deepseek_v2", "deepseek_v32", "falcon_h1", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "gptj", "llama"),
    *("llama4_text", "opt", "qwen3_moe", "qwen3_next", "whisper"),
]
# Like one of those
ALSO_USED = [
    *("cohere2", "deepseek_v3", "falcon", "gemma3_text", "glm4", "gpt_neox", "granite", "jamba", "lfm2_moe"),
    *("mixtral", "nemotron", "olmo2", "phi", "qwen2"),
]
# Their own code writes attention out otherwise than in the steps of plain attention, or asks for more than weights;
# DOGE's values themselves go into its mask
READ_DENSE = {
    *("bloom", "doge", "git", "gpt_neo", "gpt_neox_japanese", "granite_swa", "granitemoe_swa", "mpt", "mvp"),
    *("trocr", "xglm"),
}
# Without an image its mask lets decoded tokens attend to the first tokens of a prompt, be they padding: `DynamicCache`
# holds what was computed there, other caches hold nothing
ATTENDS_TO_PADDING = {"git"}
# Their cache has layers of its own
REFUSED = {"deepseek_v4"}
# The least share of families that each cache answers: works on, or reads dense where it is one of those
SHARES = {"transform": 0.98, "infinigen": 0.95, "h2o": 0.95}


class ShiftedLayer(DynamicLayer):
    """Forgets the key of its first token."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(*args, **kwargs)
        keys = keys.clone()
        keys[:, :, 0] = 0
        return keys, values


class CountingCache(DynamicCache):
    def stats(self) -> dict[str, int]:
        return {"dense_reads": self.get_seq_length()}


def refuse(model: PreTrainedModel) -> DynamicCache:
    raise ValueError("not for this model")


def crash(model: PreTrainedModel) -> DynamicCache:
    raise IndexError("out of range")


def shifted(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [ShiftedLayer() for _ in cache.layers]
    return cache


CASES = {
    "works": lambda model: DynamicCache(config=model.config),
    "reads dense": lambda model: CountingCache(config=model.config),
    "refuses": refuse,
    "fails": shifted,
}


@pytest.mark.parametrize("status", CASES)
def test_a_cache_gets_the_word_that_it_deserves(status: str) -> None:
    result = try_family("llama", {"mine": Case(make_cache=CASES[status], limit=0.01)})
    assert result.dense == ""
    assert result.outcomes["mine"].status == status, result.outcomes["mine"].detail


def test_a_crash_is_no_refusal() -> None:
    assert try_family("llama", {"mine": Case(make_cache=crash, limit=0.1)}).outcomes["mine"].status == "fails"


def test_a_family_that_hangs_or_dies_costs_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"qwen2": signal.pause, "mistral": lambda: os._exit(7)}

    def try_one(family: str, cases: object) -> survey.FamilyResult:
        ends.get(family, lambda: None)()
        return survey.FamilyResult(family=family)

    monkeypatch.setattr(survey, "try_family", try_one)
    # One second for the family that hangs, and for the others more than the busiest machine needs
    rows = [*try_families(["qwen2"], {}, seconds_a_family=1), *try_families(["mistral", "gemma"], {})]
    assert [row.family for row in rows] == ["qwen2", "mistral", "gemma"]
    assert "no answer within 1 seconds" in rows[0].dense
    assert "exit code 7" in rows[1].dense
    assert rows[2].dense == ""


def test_a_family_is_the_same_every_time() -> None:
    before = torch.get_rng_state()
    one, other = build_family("gemma2"), build_family("gemma2")
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert sum(each.numel() for each in one.parameters()) < 500_000


def test_kinds_of_layers_are_all_there_twice() -> None:
    assert build_family("gemma3_text").config.layer_types == ["sliding_attention", "full_attention"] * 2


def test_the_table_names_counts_and_reasons() -> None:
    results = [
        try_family("llama", {"mine": Case(make_cache=refuse, limit=0.1)}),
        survey.FamilyResult(family="odd", dense="TypeError: a\nb"),
    ]
    text = render_families([asdict(each) for each in results])
    assert "Of 2 families `DynamicCache` runs 1" in text
    assert "| `mine` | 0 | 0 | 1 | 0 |" in text
    assert "- `mine` refuses `llama`: ValueError: not for this model" in text
    assert "- `odd`: TypeError: a b" in text


def test_registered_caches_can_be_tried_by_their_specs() -> None:
    (case,) = cases_of(["gear-2bit:residual_length=32"]).values()
    assert type(case.make_cache(build_family("llama"))).__name__ == "GEARCache"


@pytest.mark.parametrize("family", [*USED, *(pytest.param(each, marks=pytest.mark.long) for each in ALSO_USED)])
def test_families_that_people_use(family: str) -> None:
    if family not in family_names():
        pytest.skip("of a later release of Transformers")
    result = try_family(family, own_cases())
    assert result.dense == ""
    words = {name: (outcome.status, outcome.detail) for name, outcome in result.outcomes.items()}
    if all("later releases of Transformers" in detail for _, detail in words.values()):
        pytest.skip("supported with a later release of Transformers")
    assert set(words.values()) == {("works", "")}, words


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4", "gpt_neox", "mixtral", "olmo2", "opt"])
def test_written_out_attention_says_what_fused_attention_does(family: str) -> None:
    model = build_family(family)
    tokens = prompt(model, 80, 1)
    padded = torch.cat([tokens, tokens.flip(1).index_fill(1, torch.arange(13), 0)])
    mask = torch.ones_like(padded).index_fill(1, torch.arange(13), 0)
    mask[0] = 1
    logits, forced = [], None
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        cache = GEARCache(model.config, nbits=2, residual_length=16)
        run = generate(model, cache, padded, mask, 20, forced)
        assert run.dense_reads == 0
        assert cache.stats()["tokens_compressed"] > 0
        forced = run.tokens
        logits.append(run.logits)
    assert torch.allclose(*logits, atol=2e-3 * float(logits[0].std()))


@pytest.mark.long
@pytest.mark.slow
def test_all_families() -> None:
    results = [result for result in try_families(family_names(), own_cases()) if not result.dense]
    assert len(results) >= 110
    for name, share in SHARES.items():
        counts = Counter(result.outcomes[name].status for result in results)
        assert counts["works"] + counts["reads dense"] >= share * len(results), name
    words = {result.family: result.outcomes["transform"].status for result in results}
    assert {family for family, status in words.items() if status == "reads dense"} <= READ_DENSE
    assert {family for family, status in words.items() if status == "refuses"} <= REFUSED
    failed = {result.family for result in results for each in result.outcomes.values() if each.status == "fails"}
    assert failed <= ATTENDS_TO_PADDING
