"""Steps that are recorded and replayed, where there are no graphs: tokens and contents are those of the cache as it is.

Kernels that read lengths on the device are tested in `tests/triton_kernels`, what a step asks of a GPU in
`test_recorded_step.py`.
"""

import copy

import pytest
import torch

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.gear.fixed_storage import FixedBuffer


PRESETS = ["gear", "gear-t16", "gear-2bit", "kivi-2bit", "gear-k4v3"]


def prompts(batch_size, length, padding=0):
    ids = torch.randint(3, 96, (batch_size, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, cache, inputs, num_tokens):
    return model.generate(**inputs, past_key_values=cache, max_new_tokens=num_tokens, do_sample=False)


def contents(cache):
    """What a cache holds, room aside."""
    tensors = [tensor for layer in cache.layers for part, tensor in layer.named_tensors() if part not in ("spare", "residual")]
    return [*tensors, *(layer.materialize(side) for layer in cache.layers for side in ("keys", "values"))]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("batch_size", "length", "padding"), [(1, 131, 0), (2, 97, 5)], ids=["alone", "padded"])
def test_tokens_are_those_of_the_cache(name, batch_size, length, padding, tiny_llama):
    inputs, num_tokens = prompts(batch_size, length, padding), 140
    expected = create_cache(name, tiny_llama)
    tokens = generate(tiny_llama, expected, inputs, num_tokens)
    cache = create_cache(name, tiny_llama)
    with cache.captured_steps(tiny_llama, num_tokens) as steps:
        assert torch.equal(generate(tiny_llama, cache, inputs, num_tokens), tokens)
    residual_length = cache.gear_config.residual_length
    # The prompt, and the steps before which a chunk was compressed
    assert (steps.num_recorded, steps.num_others) == (1, 1 + (num_tokens - 2) // residual_length)
    assert steps.num_replayed == num_tokens - steps.num_others
    assert cache.stats() == expected.stats()
    for mine, theirs in zip(contents(cache), contents(expected), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=1e-3)
