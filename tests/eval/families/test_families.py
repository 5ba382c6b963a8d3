"""The families that people use: no cache makes a layer dense while they decode, and nothing is wrong or refused.

One of each kind here, all in `make test-long`.
"""

from collections import Counter

import pytest
import torch

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.eval.families.command import own_cases
from kvcache_plugins.eval.families.survey import build_family, family_names, try_families, try_family
from kvcache_plugins.eval.families.trial import generate, prompt


# fmt: off
USED = [
    "deepseek_v2", "deepseek_v32", "falcon_h1", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "gptj", "llama",
    "llama4_text", "opt", "qwen3_moe", "qwen3_next", "whisper",
]
# Like one of those
ALSO_USED = [
    "cohere2", "deepseek_v3", "falcon", "gemma3_text", "glm4", "gpt_neox", "granite", "jamba", "lfm2_moe", "mixtral",
    "nemotron", "olmo2", "phi", "qwen2",
]
# fmt: on
# Their own code writes attention out; DOGE's values themselves go into its mask
# fmt: off
READ_DENSE = {
    "big_bird", "bloom", "doge", "git", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpt", "mvp", "rembert",
    "roformer", "trocr", "xglm",
}
# fmt: on
# Their cache has layers of its own
REFUSED = {"deepseek_v4"}
# The least share of families that each cache answers: works on, or reads dense where it is one of those
SHARES = {"gear": 0.98, "infinigen": 0.95, "h2o": 0.95}


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


@pytest.mark.parametrize("name", ["gear-4bit", "infinigen", "h2o", "turboquant-4bit"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_softcaps_and_sinks_are_answered_from_what_is_stored(family: str, name: str) -> None:
    model = build_family(family)
    options = {"full_layers": ()} if name == "infinigen" else {}
    cache = create_cache(name, model, **options)
    run = generate(model, cache, prompt(model, 80, 1), None, 20, None)
    stats = cache.stats()
    assert run.dense_reads == stats["dense_reads"] == 0
    assert stats["attend_calls"] > 0


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
    words = {result.family: result.outcomes["gear"].status for result in results}
    assert {family for family, status in words.items() if status == "reads dense"} <= READ_DENSE
    assert {family for family, status in words.items() if status == "refuses"} <= REFUSED
    assert not [result.family for result in results for each in result.outcomes.values() if each.status == "fails"]
