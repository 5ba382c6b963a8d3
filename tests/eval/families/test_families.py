"""The families that people use: no cache makes a layer dense while they decode, and nothing is wrong or refused.

One of each kind here, all in `make test-long`.
"""

from collections import Counter

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import GEARCache
from kvcache_plugins.eval.families.command import own_cases
from kvcache_plugins.eval.families.survey import build_family, family_names, try_families, try_family
from kvcache_plugins.eval.families.trial import generate, prompt
from kvcache_plugins.layers.compressed_layer import CompressedLayer


# fmt: off
USED = [
    "bloom", "deepseek_v2", "deepseek_v32", "falcon_h1", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "gptj", "llama",
    "llama4_text", "opt", "qwen3_moe", "qwen3_next", "whisper",
]
# Like one of those
ALSO_USED = [
    "cohere2", "deepseek_v3", "falcon", "gemma3_text", "glm4", "gpt_neox", "granite", "jamba", "lfm2_moe", "mixtral",
    "mpt", "nemotron", "olmo2", "phi", "qwen2",
]
# fmt: on
# The values themselves go into its mask
READ_DENSE = {"doge"}
# Their cache has layers of its own; attends to padding when it decodes
REFUSED = {"deepseek_v4", "git"}
# The least share of families that each cache works on, without a layer made dense
SHARES = {"gear": 0.95, "infinigen": 0.85, "h2o": 0.85}


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


@pytest.mark.parametrize("family", ["bloom", "gemma2", "gpt_oss", "gptj"])
def test_attention_that_only_exists_written_out_is_answered(family: str) -> None:
    model = build_family(family)
    if model.config._attn_implementation == "sdpa":
        pytest.skip("fused in this release of Transformers")
    cache = GEARCache(model.config, nbits=2, residual_length=16)
    generate(model, cache, prompt(model, 80, 1), None, 20, None)
    stats = cache.stats()
    assert stats["dense_reads"] == 0
    assert stats["tokens_compressed"] > 0
    own = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    assert stats["written_out_calls"] == 19 * len(own)


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


def test_padding_that_a_model_attends_to_is_refused_unless_it_is_kept() -> None:
    """GIT hides padding from its prompt and, without an image, attends to it when it decodes."""
    model = build_family("git")
    tokens = prompt(model, 80, 1).repeat(2, 1)
    mask = torch.ones_like(tokens)
    mask[1, :13] = 0
    other = tokens.masked_fill(mask == 0, 9)
    both = [generate(model, DynamicCache(config=model.config), each, mask, 6, tokens) for each in (tokens, other)]
    if torch.allclose(both[0].logits, both[1].logits, atol=1e-5):
        pytest.skip("hidden in both, in this release of Transformers")
    with pytest.raises(ValueError, match="attends to padding when it decodes"):
        generate(model, GEARCache(model.config, nbits=8), tokens, mask, 6, None)
    dense = generate(model, DynamicCache(config=model.config), tokens, mask, 6, None)
    cache = GEARCache(model.config, nbits=8, attention_mask=torch.ones_like(tokens))
    run = generate(model, cache, tokens, mask, 6, dense.tokens)
    assert torch.allclose(run.logits, dense.logits, atol=0.1 * float(dense.logits.std()))
    assert cache.stats()["tokens_compressed"] > 0


@pytest.mark.long
@pytest.mark.slow
def test_all_families() -> None:
    results = [result for result in try_families(family_names(), own_cases()) if not result.dense]
    assert len(results) >= 110
    for name, share in SHARES.items():
        assert Counter(result.outcomes[name].status for result in results)["works"] >= share * len(results), name
    words = {result.family: result.outcomes["gear"].status for result in results}
    assert {family for family, status in words.items() if status == "reads dense"} <= READ_DENSE
    assert {family for family, status in words.items() if status == "refuses"} <= REFUSED
    assert not [result.family for result in results for each in result.outcomes.values() if each.status == "fails"]
