"""A dense cache that listens gives what one gives that does not, and knows the newest queries."""

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins.layers.listening_layer import ListeningLayer, listen


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "gpt2"])
@torch.no_grad()
def test_it_listens_and_changes_nothing(tiny_model, architecture, implementation):
    model = tiny_model(architecture, attn_implementation=implementation)
    token_ids, mask = torch.randint(2, 128, (2, 300)), torch.ones(2, 300, dtype=torch.long)
    mask[1, :50] = 0
    cache, dense = (DynamicCache(config=model.config) for _ in range(2))
    listen(cache)
    listening = [layer for layer in cache.layers if isinstance(layer, ListeningLayer)]
    assert len(listening) == 2
    for part in (slice(0, 280), slice(280, 300)):
        logits, expected = (
            model(token_ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=each).logits
            for each in (cache, dense)
        )
        assert torch.equal(logits * mask[:, part, None], expected * mask[:, part, None])
        for layer in listening:
            assert layer.queries.shape == (2, 4, min(256, part.stop - part.start), layer.keys.shape[3])
