"""InfiniGen on pretrained models: exact where everything is fetched, and near where a tenth is."""

from pathlib import Path

import pytest
import torch
from decoding import kl_to_dense
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import H2OCache, InfiniGenCache


TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
EVERYTHING = {"alpha": float("inf"), "max_fetch_ratio": 1.0, "speculate": True}
LENGTHS = (200, 131, 47)
NUM_NEW = 8


def prompts(tokenizer, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Passages of a text, left-padded."""
    token_ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    input_ids = torch.full((len(lengths), max(lengths)), tokenizer.eos_token_id)
    mask = torch.zeros_like(input_ids)
    for item, length in enumerate(lengths):
        input_ids[item, -length:] = token_ids[300 * item : 300 * item + length]
        mask[item, -length:] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def generate(model: PreTrainedModel, batch: dict[str, torch.Tensor], cache):
    return model.generate(
        **batch,
        past_key_values=cache,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize(
    "lengths", [pytest.param(LENGTHS[:1], marks=pytest.mark.long), LENGTHS], ids=["one", "left-padded"]
)
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_everything_fetched_says_the_same(name: str, lengths: tuple[int, ...], request) -> None:
    model, tokenizer = request.getfixturevalue(name)
    batch = prompts(tokenizer, lengths)
    with InfiniGenCache(model, **EVERYTHING) as cache:
        output = generate(model, batch, cache)
    expected = generate(model, batch, DynamicCache(config=model.config))
    assert torch.equal(output.sequences, expected.sequences)
    logits, expected_logits = (torch.stack(each.logits) for each in (output, expected))
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    stats = cache.stats()
    assert stats["speculated_calls"] == stats["selected_calls"] == (NUM_NEW - 1) * stats["layers_offloaded"]
    assert stats["dense_reads"] == 0


@pytest.mark.long
def test_a_tenth_of_the_tokens_is_enough(smollm2) -> None:
    model, tokenizer = smollm2
    token_ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :1300]
    parts = token_ids[:, :-32], token_ids[:, -32:]
    with InfiniGenCache(model, max_fetch_ratio=0.15, track_hits=True) as cache:
        kl = kl_to_dense(model, cache, *parts)
    stats = cache.stats()
    share = stats["tokens_fetched"] / stats["tokens_fetchable"]
    assert 0.05 < share < 0.12
    # Expected queries choose what the true ones would have chosen
    assert stats["hits"] > 0.7 * stats["hits_possible"]
    h2o = kl_to_dense(model, H2OCache(model.config, heavy_ratio=share / 2, recent_ratio=share / 2), *parts)
    assert kl < min(0.03, h2o / 3)
