"""Attention by tiles equals PyTorch's over the whole, with every kind of mask and head layout."""

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.kernels.attention import OnlineAttention
from kvcache_plugins.kernels.masks import combine_masks, leading_padding, mask_columns, slice_mask


TILES = [(0, 1), (1, 64), (64, 129), (129, 200)]


def attend_by_tiles(query, keys, values, mask, scale=None):
    attention = OnlineAttention(query, keys.shape[1], scale)
    for start, stop in TILES:
        attention.add_tile(keys[:, :, start:stop], values[:, :, start:stop], slice_mask(mask, start, stop))
    return attention.result()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("num_queries", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "per-head", "2d"])
def test_equals_dense_attention(heads, num_queries, dtype, kind):
    query = torch.randn(2, heads[0], num_queries, 24).to(dtype)
    keys, values = (torch.randn(2, heads[1], 200, 24).to(dtype) for _ in range(2))
    allowed = torch.rand(2, 1, num_queries, 200) > 0.3
    mask = {
        "none": None,
        "bool": allowed,
        "additive": torch.where(allowed, 0.5, torch.finfo(dtype).min).to(dtype),
        "per-head": torch.rand(2, heads[0], num_queries, 200) > 0.3,
        "2d": allowed[0, 0],
    }[kind]
    float_mask = mask.float() if kind == "additive" else mask
    expected = F.scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), attn_mask=float_mask, scale=0.3, enable_gqa=True
    )
    output = attend_by_tiles(query, keys, values, mask, scale=0.3)
    assert output.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(output.float(), expected, atol=tolerance, rtol=tolerance)


def test_rows_that_attend_to_nothing_are_zero_and_first_tiles_may_be_masked():
    query, keys, values = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200, 8)
    mask = torch.zeros(1, 1, 2, 200, dtype=torch.bool)
    mask[..., 1, 150:] = True
    output = attend_by_tiles(query, keys, values, mask)
    assert torch.equal(output[:, :, 0], torch.zeros(1, 2, 8))
    expected = F.scaled_dot_product_attention(query[:, :, 1:], keys[:, :, 150:], values[:, :, 150:])
    assert torch.allclose(output[:, :, 1:], expected, atol=1e-6)


def test_values_may_have_another_head_dim():
    query, keys, values = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200, 12)
    assert attend_by_tiles(query, keys, values, None).shape == (1, 4, 1, 12)


@pytest.mark.parametrize("additive", [False, True])
def test_padding_is_learned_from_the_mask(additive):
    padding = torch.tensor([0, 3, 6])
    columns = torch.arange(8)
    allowed = (columns >= padding[:, None])[:, None, None, :] & torch.ones(8, 8, dtype=torch.bool).tril()
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min) if additive else allowed
    assert leading_padding(mask, 0, None, 3).tolist() == padding.tolist()
    # In two updates, the first of which is nothing but padding for the last item
    known = leading_padding(mask[:, :, :4, :4], 0, None, 3)
    assert known.tolist() == [0, 3, 4]
    assert leading_padding(mask[:, :, 4:], 4, known, 3).tolist() == padding.tolist()


def test_a_sliding_window_is_not_padding():
    distance = torch.arange(8)[:, None] - torch.arange(8)
    mask = ((distance >= 0) & (distance < 3))[None, None]
    assert leading_padding(mask, 0, None, 1) is None


def test_columns_are_gathered_and_narrowed():
    mask = torch.rand(2, 1, 3, 10) > 0.5
    positions = torch.tensor([[0, 1], [4, 12]])
    gathered = mask_columns(mask, positions, 2, 10)
    assert torch.equal(gathered[1, :, :, 0], mask[1, :, :, 4])
    assert torch.equal(gathered[1, :, :, 1], mask[1, :, :, 9])
    allowed = torch.tensor([[True, False], [True, True]])
    assert not combine_masks(gathered, allowed)[0, :, :, 1].any()
    assert combine_masks(torch.zeros(2, 1, 3, 2), allowed)[0, 0, 0].tolist() == [0, -torch.inf]
