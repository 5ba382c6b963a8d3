"""GEAR on the states of a pretrained model: what tiny random models cannot show."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import GEARCache


TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
# On states that are made up `tests/codecs/test_groups.py` shows the same
pytestmark = pytest.mark.long
LENGTHS = (678, 227, 73)


@pytest.fixture(scope="module")
def batch(smollm2):
    """Three passages of different lengths, left-padded."""
    _, tokenizer = smollm2
    token_ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    input_ids = torch.full((len(LENGTHS), max(LENGTHS)), tokenizer.eos_token_id)
    mask = torch.zeros_like(input_ids)
    for item, length in enumerate(LENGTHS):
        input_ids[item, -length:] = token_ids[300 * item : 300 * item + length]
        mask[item, -length:] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def reconstruction_errors(model, batch, dense, **options):
    """Squared error of every layer, item and head, `[sides * layers, batch_size, num_heads]`."""
    cache = GEARCache(**options)
    with torch.inference_mode():
        model(**batch, past_key_values=cache, logits_to_keep=1)
    real = batch["attention_mask"][:, None, :, None]
    return torch.stack(
        [
            ((getattr(exact, side) - layer.materialize(side)) * real).square().sum(dim=(2, 3))
            for exact, layer in zip(dense.layers, cache.layers, strict=True)
            for side in ("keys", "values")
        ]
    )


@pytest.mark.parametrize(
    ("nbits", "backbone"),
    [(2, "kivi"), (2, "kcvt"), (4, "kcvt"), (4, "per-token")],
)
def test_each_part_lowers_the_error_of_every_head(smollm2, batch, nbits, backbone):
    model, _ = smollm2
    # The two shorter items, so that it takes seconds
    batch = {name: tensor[1:, -LENGTHS[1] :] for name, tensor in batch.items()}
    dense = DynamicCache()
    with torch.inference_mode():
        model(**batch, past_key_values=dense, logits_to_keep=1)
    gear, gear_l, plain = (
        reconstruction_errors(model, batch, dense, nbits=nbits, backbone=backbone, sparsity=sparsity, rank=rank)
        for sparsity, rank in ((0.02, 4), (0.0, 4), (0.0, 0))
    )
    assert (gear < gear_l).all()
    assert (gear_l < plain).all()
