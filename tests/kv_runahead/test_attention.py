"""Attention behind a prefix, against a mask of queries x keys in double precision."""

import pytest
import torch

from kvcache_plugins.kv_runahead.attention import attend_behind_prefix


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def attend_with_mask(query, keys, values, padding=None, window=None, scale=None):
    """The reference; rows that see nothing are zero."""
    num_new, length, groups = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(groups, dim=1) for states in (keys, values))
    distance = torch.arange(length - num_new, length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length + 1))
    seen = seen[None].repeat(query.shape[0], 1, 1)
    for item, count in enumerate(padding or []):
        seen[item, :, :count] = False
    scores = query.double() @ keys.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=3)
    return weights.nan_to_num() @ values


# Heads of queries and of keys, new tokens, all tokens, dimensions of keys and values, padding, window
SHAPES = {
    "grouped": (9, 3, 37, 101, 64, 64, None, None),
    "one key head, padded": (4, 1, 17, 50, 20, 20, [0, 40, 50], None),
    "every head its own, no prefix": (4, 4, 50, 50, 32, 32, [3, 0], None),
    "one new token": (6, 2, 1, 40, 16, 16, [0, 5], None),
    "keys and values differ": (4, 2, 30, 60, 16, 24, [0, 45], None),
    "window over blocks": (4, 2, 700, 1200, 32, 32, [0, 600], 300),
    "window smaller than a block": (4, 2, 300, 400, 32, 32, None, 7),
    "window as long as everything": (4, 2, 20, 64, 32, 32, [1, 0], 64),
}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_attention_behind_a_prefix_equals_masked_attention(shape, dtype):
    num_heads, num_key_heads, num_new, length, key_dim, value_dim, padding, window = SHAPES[shape]
    batch_size = len(padding or [0])
    # Laid out as they come: queries from a projection, states from rows of tokens
    query = torch.randn(batch_size, num_new, num_heads, key_dim, dtype=dtype).transpose(1, 2)
    rows = torch.randn(length, batch_size, num_key_heads, key_dim + value_dim, dtype=dtype).permute(1, 2, 0, 3)
    keys, values = rows[..., :key_dim], rows[..., key_dim:]
    output = attend_behind_prefix(query, keys, values, padding=padding, window=window)
    expected = attend_with_mask(query, keys, values, padding, window)
    assert output.dtype == dtype and output.shape == expected.shape
    assert (output - expected).abs().max() < TOLERANCE[dtype]


def test_scale_and_large_scores_equal_masked_attention():
    query, keys, values = (torch.randn(1, 2, length, 32) * 30 for length in (20, 80, 80))
    output = attend_behind_prefix(query, keys, values, scale=0.7)
    expected = attend_with_mask(query, keys, values, scale=0.7)
    assert (output - expected).abs().max() < 1e-2


def test_no_mask_is_made(monkeypatch):
    """Neither of the fast ways hands PyTorch a mask."""
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, attn_mask=None, **options: masks.append(attn_mask) or attention(*args, **options),
    )
    query, keys, values = (torch.randn(2, 2, length, 32) for length in (20, 80, 80))
    attend_behind_prefix(query, keys, values, padding=[0, 70])
    attend_behind_prefix(keys, keys, values)
    assert masks == [None, None]
