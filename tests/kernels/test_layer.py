"""Attention over exact tokens by the C kernels, against plain PyTorch."""

import pytest
import torch

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.attention import attend as attend_parts
from kvcache_plugins.kernels.compiled import AttentionCall


# Batch, heads, queries a head, new tokens, channels of keys and of values, tokens
SIZES = {
    "smollm2": (1, 3, 3, 1, 64, 64, 8),
    "several-tiles": (2, 2, 5, 3, 20, 33, 130),
    "wide-values": (1, 1, 1, 1, 8, 300, 700),
}


def attend(query, part, num_heads, scale):
    call = AttentionCall(query, num_heads, part.values.shape[3], scale)
    call.add_exact(part)
    return call.run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_attention_is_that_of_pytorch(level, sizes, dtype):
    batch_size, num_heads, groups, num_queries, key_dim, value_dim, length = sizes
    query = torch.randn(batch_size, num_heads * groups, num_queries, key_dim).to(dtype)
    keys, values = (torch.randn(batch_size, num_heads, length + 3, size).to(dtype) for size in (key_dim, value_dim))
    output = attend(query, DensePart(keys, values, length, None), num_heads, 0.3)
    exact = DensePart(keys.float(), values.float(), length, None)
    expected = attend_parts(query.float(), [exact], num_heads, 0.3).to(dtype)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_to_the_nearest(level, dtype):
    # Means of two neighbours are ties, of all magnitudes that there are
    steps = torch.arange(*((0, 0x7BFF) if dtype == torch.float16 else (0x80, 0x7F00)), 7, dtype=torch.int16)
    low, high = (each.view(dtype).view(1, 1, 1, -1) for each in (steps, steps + 1))
    values = torch.cat([low, high], dim=2)[..., : 640 * (len(steps) // 640)]
    values = torch.cat(values.split(640, dim=3), dim=1)
    zeros = values.new_zeros(1, values.shape[1], 2, 8)
    output = attend(zeros[:, :, :1], DensePart(zeros, values, 2, None), values.shape[1], 1.0)
    expected = (values[:, :, :1].float() * 0.5 + values[:, :, 1:].float() * 0.5).to(dtype)
    torch.testing.assert_close(output, expected, atol=0, rtol=0)
