"""Masks that hide tokens wherever they are: caches that keep all tokens compute what `DynamicCache` does.

A mask says which tokens the queries of one forward may see, and nothing about later forwards, other layers or the
prompt that the cache holds.
"""

from typing import NamedTuple

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache


SMALL = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1},
    **{"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
}
# The first layer has the window
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# An indexer hides all but 64 tokens from each query, itself too
INDEXED = {
    **{"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 24},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4},
    **{"n_group": 1, "topk_group": 1, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16},
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {**WINDOWS, "use_sliding_window": True},
    "gemma2": WINDOWS,
    "gemma3_text": WINDOWS,
    "gpt_oss": {**WINDOWS, **EXPERTS},
    "deepseek_v32": INDEXED,
}
ALL = {"alpha": float("inf"), "max_fetch_ratio": 1.0, "full_layers": (), "recent": 8}
EXACT = [
    ("infinigen", {**ALL, "speculate": False}),
    ("infinigen", {**ALL, "speculate": True}),
    ("h2o", {"heavy_ratio": 0.5, "recent_ratio": 0.5}),
]


class Hidden(NamedTuple):
    """Number of tokens of each forward, and the hidden ones: sequence, first, and the one after the last."""

    counts: list[int]
    ranges: list[tuple[int, int, int]]


STEPS = [1] * 4
CHUNKS = [16, 16, 16, 12, *STEPS]
CASES = {
    "left": Hidden([60, *STEPS], [(0, 0, 9)]),
    "holes": Hidden([60, *STEPS], [(0, 20, 30), (1, 3, 8), (1, 50, 59)]),
    "right": Hidden([60, *STEPS], [(0, 55, 60), (1, 58, 60)]),
    # Turns are padded one by one, and of two answers one is shorter
    "turns": Hidden(
        [48, *STEPS, 16, *STEPS, 16, *STEPS], [(0, 0, 9), (0, 48, 52), (1, 52, 66), (1, 68, 72), (0, 72, 86)]
    ),
    "token by token": Hidden([1] * 50, [(0, 0, 9), (1, 20, 30)]),
    "chunks": Hidden(CHUNKS, [(0, 0, 24), (1, 0, 16)]),
    "a chunk of all items": Hidden(CHUNKS, [(0, 32, 48), (1, 32, 48)]),
    "a chunk of the item that has begun": Hidden(CHUNKS, [(0, 0, 32), (1, 16, 32)]),
    "few at once behind many": Hidden([150, 2, 3, 8, *STEPS, 8], [(0, 0, 9)]),
}


def build(family: str) -> PreTrainedModel:
    if family not in CONFIG_MAPPING:
        pytest.skip("this release of Transformers does not have the family")
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SMALL, **FAMILIES[family]})).eval()


@torch.no_grad()
def forward_all(
    model: PreTrainedModel, cache: Cache, tokens: torch.Tensor, mask: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    """Logits of all tokens, so many a forward."""
    logits, stop = [], 0
    for count in counts:
        stop += count
        positions = (mask[:, :stop].cumsum(dim=1) - 1).clamp(min=0)[:, -count:]
        own = tokens[:, stop - count : stop]
        output = model(own, past_key_values=cache, attention_mask=mask[:, :stop], position_ids=positions)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


# Latent attention is over projections of all tokens, and its queries cannot be predicted
@pytest.mark.filterwarnings("ignore:the whole cache is fetched", "ignore:`model`")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_dense_caches_under_any_mask(family: str, case: str) -> None:
    model, (counts, ranges) = build(family), CASES[case]
    tokens = torch.randint(3, 128, (2, sum(counts)))
    mask = torch.ones_like(tokens)
    for item, start, stop in ranges:
        mask[item, start:stop] = 0
    expected = forward_all(model, DynamicCache(config=model.config), tokens, mask, counts)
    for name, options in EXACT:
        logits = forward_all(model, create_cache(name, model, **options), tokens, mask, counts)
        assert logits[mask.bool()].sub(expected[mask.bool()]).abs().max() < 1e-4, (name, options)


@pytest.mark.parametrize("name", ["transform", "gear-4bit", "turboquant-4bit", "llamacpp-q8_0"])
def test_coded_caches_take_few_tokens_at_once_behind_an_indexer(name: str) -> None:
    model, tokens = build("deepseek_v32"), torch.randint(3, 128, (1, 170))
    run = [150, 2, 2, 2, 3, 3, 8]
    expected, other = (
        forward_all(model, DynamicCache(config=model.config), each, torch.ones_like(each), run)
        for each in (tokens, tokens.flip(1))
    )
    logits = forward_all(model, create_cache(name, model), tokens, torch.ones_like(tokens), run)
    assert (logits - expected).abs().mean() < 0.1 * (other - expected).abs().mean()


# Tokens fetched ahead are chosen under a mask that may not be known yet
@pytest.mark.parametrize(("name", "options"), [EXACT[0], EXACT[2]], ids=["infinigen", "h2o"])
@torch.no_grad()
def test_a_later_mask_may_show_tokens_hidden_so_far(name: str, options: dict, tiny_llama: PreTrainedModel) -> None:
    tokens = torch.randint(3, 128, (2, 68))
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[0, :9] = mask[:, 20:30] = 0
    logits = []
    for cache in (DynamicCache(), create_cache(name, tiny_llama, **options)):
        tiny_llama(tokens[:, :60], past_key_values=cache, attention_mask=mask)
        parts = tokens[:, 60:].split([1, 1, 5, 1], dim=1)
        logits.append(torch.cat([tiny_llama(part, past_key_values=cache).logits for part in parts], dim=1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
