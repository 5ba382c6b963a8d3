"""H2O on a pretrained model: heavy hitters are what a random model does not have."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from kvcache_plugins import H2OCache


TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
PREFIX, SCORED = 300, 64
# That it drops the tokens it should is shown by a plain simulation: `test_h2o.py`
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def token_ids(smollm2):
    _, tokenizer = smollm2
    return tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids


@torch.inference_mode()
def decoded(model, token_ids, cache):
    """Log-probabilities after every scored token, in chunks that drop tokens between them."""
    logits = [model(token_ids[:, :PREFIX], past_key_values=cache, logits_to_keep=1).logits]
    chunks = token_ids[:, PREFIX : PREFIX + SCORED].split(16, dim=1)
    logits.extend(model(chunk, past_key_values=cache).logits for chunk in chunks)
    return F.log_softmax(torch.cat(logits, dim=1).float(), dim=-1)


def test_distance_from_dense_falls_with_the_budget(smollm2, token_ids):
    model, _ = smollm2
    expected = decoded(model, token_ids, DynamicCache())
    distances = {}
    for ratio in (0.05, 0.1, 0.25):
        cache = H2OCache(model.config, heavy_ratio=ratio, recent_ratio=ratio)
        logits = decoded(model, token_ids, cache)
        distances[ratio] = F.kl_div(logits, expected, log_target=True, reduction="sum").item() / (SCORED + 1)
        # The last chunk is still whole
        assert 0 < cache.stats()["tokens_kept"] <= 30 * (2 * ratio * (PREFIX + SCORED) + 16)
    assert 0 < distances[0.25] < distances[0.1] < distances[0.05] < 2
