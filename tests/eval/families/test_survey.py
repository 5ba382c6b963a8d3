"""What the table of families says of a cache is true: right ones work, and each way of being wrong has its word."""

import os
import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_plugins.eval.families import survey
from kvcache_plugins.eval.families.command import cases_of, result_rows
from kvcache_plugins.eval.families.survey import Case, build_family, family_names, try_families, try_family
from kvcache_plugins.eval.tables.families import render_families


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
    ends = {"qwen2": lambda: time.sleep(60), "mistral": lambda: os._exit(7)}

    def try_one(family: str, cases: object) -> survey.FamilyResult:
        ends.get(family, lambda: None)()
        return survey.FamilyResult(family=family)

    monkeypatch.setattr(survey, "try_family", try_one)
    rows = list(try_families(["qwen2", "mistral", "gemma"], {}, seconds_a_family=3))
    assert [row.family for row in rows] == ["qwen2", "mistral", "gemma"]
    assert "no answer within 3 seconds" in rows[0].dense
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
    text = render_families(result_rows(results))
    assert "Of 2 families `DynamicCache` runs 1" in text
    assert "| `mine` | 0 | 0 | 1 | 0 |" in text
    assert "- `mine` refuses `llama`: ValueError: not for this model" in text
    assert "- `odd`: TypeError: a b" in text


def test_registered_caches_can_be_tried_by_their_specs() -> None:
    (case,) = cases_of(["gear-2bit:residual_length=32"]).values()
    assert type(case.make_cache(build_family("llama"))).__name__ == "GEARCache"


def test_every_decoder_is_listed_once() -> None:
    names = family_names()
    assert len(names) == len(set(names)) >= 110
    assert {"llama", "gpt_oss", "deepseek_v3", "bloom"} <= set(names)
