"""The families that people use: GEAR never makes a layer dense while they decode, and nothing is wrong or refused.

Thirty of them here, all others in `make test-long`.
"""

import pytest

from kvcache_plugins.contract.families.cases import own_cases
from kvcache_plugins.contract.families.survey import family_names, try_families, try_family


# fmt: off
USED = [
    "bloom", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "falcon", "falcon_h1", "gemma2", "gemma3_text",
    "gemma4_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "jamba", "lfm2_moe", "llama",
    "llama4_text", "mixtral", "mpt", "nemotron", "olmo2", "opt", "phi", "qwen2", "qwen3_moe", "qwen3_next", "whisper",
]
# fmt: on
# The values themselves go into its mask
READ_DENSE = {"doge"}
# Their cache is a class, or has layers, of its own
REFUSED = {"deepseek_v4"}


@pytest.mark.parametrize("family", USED)
def test_families_that_people_use(family: str) -> None:
    result = try_family(family, own_cases())
    assert result.dense == ""
    words = {name: (outcome.status, outcome.detail) for name, outcome in result.outcomes.items()}
    assert words["gear"] == ("works", "")
    assert {status for status, _ in words.values()} <= {"works", "reads dense"}, words


@pytest.mark.long
@pytest.mark.slow
def test_all_families() -> None:
    results = [result for result in try_families(family_names(), own_cases()) if not result.dense]
    assert len(results) >= 110
    words = {result.family: result.outcomes["gear"].status for result in results}
    assert {family for family, status in words.items() if status == "reads dense"} <= READ_DENSE
    assert {family for family, status in words.items() if status == "refuses"} <= REFUSED
    assert not [result.family for result in results for each in result.outcomes.values() if each.status == "fails"]
