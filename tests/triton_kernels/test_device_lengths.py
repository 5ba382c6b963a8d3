"""Attention whose lengths are read on the device, over storage with room for more, against plain PyTorch over what is
in use: in Triton's interpreter or on a GPU."""

import os

import pytest
import torch

from kvcache_plugins.gear.fixed_storage import FixedForm
from kvcache_plugins.gear.step_numbers import StepNumbers
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.registry import create_cache


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)
# Relative RMS error, float32
TOLERANCE = 1e-5
HEAD_DIM = 16
# So much that a split, and more than one, has no tokens
ROOM = 700
SHORT = {"q_group_size": 8, "residual_length": 8}
# Preset, options, padding, heads, query heads a head, tokens of the prompt, decoded tokens
CASES = {
    "gear": ("gear", {"residual_length": 4}, [0], 1, 3, 67, 9),
    "gear-padded": ("gear", {"residual_length": 4}, [0, 5], 2, 2, 75, 5),
    "gear-t16": ("gear-t16", {"residual_length": 4}, [0], 2, 1, 70, 2),
    "gear-2bit": ("gear-2bit", SHORT, [0], 1, 4, 35, 19),
    "kivi-2bit": ("kivi-2bit", SHORT, [3, 0], 2, 1, 21, 18),
    "kivi-2bit-undecoded": ("kivi-2bit", SHORT, [0], 1, 2, 17, 1),
    "gear-k4v3": ("gear-k4v3", SHORT, [0], 1, 2, 18, 9),
}


def fill(name, options, padding, num_heads, num_prompt, num_decoded):
    """A cache of one layer, and its layer."""
    cache, batch_size = create_cache(name, **options), len(padding)
    hidden = torch.tensor(padding)[:, None] > torch.arange(num_prompt + num_decoded)
    for count in (num_prompt, *[1] * num_decoded):
        keys, values = torch.randn(2, batch_size, num_heads, count, HEAD_DIM, device=DEVICE)
        query = torch.randn(batch_size, num_heads, count, HEAD_DIM, device=DEVICE)
        length = cache.get_seq_length() + count
        mask = (~hidden[:, None, None, :length]).expand(-1, 1, count, length).tril(length - count).to(DEVICE)
        torch.nn.functional.scaled_dot_product_attention(query, *cache.update(keys, values, 0), attn_mask=mask)
    return cache, cache.layers[0], ~hidden.to(DEVICE)


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_pytorch(case):
    name, options, padding, num_heads, groups, num_prompt, num_decoded = CASES[case]
    _, layer, seen = fill(name, options, padding, num_heads, num_prompt, num_decoded)
    query = torch.randn(len(padding), groups * num_heads, 1, HEAD_DIM, device=DEVICE)
    expected = attend(query, layer._parts(seen[:, None, None]), num_heads, None, "torch")
    form, numbers = FixedForm(layer, ROOM), StepNumbers(query.device)
    stored, exact, total = form.numbers()
    # As if the newest token were the one that is being stored
    numbers.set((stored, exact - 1, total - 1))
    output = attend(query, form.parts(numbers), num_heads, None, "triton")
    error = (output - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCE, error
