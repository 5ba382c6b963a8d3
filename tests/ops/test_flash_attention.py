"""Attention over tiles by PyTorch's flash attention, against the reference."""

import pytest
import torch

from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.attention import OnlineAttention, attend
from kvcache_plugins.kernels.engine import choose_flash
from kvcache_plugins.kernels.masks import slice_mask


SIZES = (130, 7, 63)
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
NUM_QUERIES, NUM_HEADS, GROUPS = 17, 3, 2


def make_masks(kind: str) -> torch.Tensor | None:
    """Over all tiles, two items."""
    total = sum(SIZES)
    if kind == "none":
        return None
    if kind == "causal":
        return torch.ones(1, 1, NUM_QUERIES, total, dtype=torch.bool).tril(total - NUM_QUERIES)
    allowed = torch.rand(2, NUM_HEADS * GROUPS, NUM_QUERIES, total) > 0.4
    # Rows that are hidden all of a tile, one of the first tile, one of a later one, and one that is hidden everything
    allowed[0, 0, 2, : SIZES[0]] = False
    allowed[1, :, 3, SIZES[0] : SIZES[0] + SIZES[1]] = False
    allowed[:, :, 5] = False
    if kind == "boolean":
        return allowed
    return torch.randn(allowed.shape).masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "added"])
def test_equals_the_reference(kind, dtype, monkeypatch):
    torch.manual_seed(0)
    query = torch.randn(2, NUM_HEADS * GROUPS, NUM_QUERIES, 32, dtype=dtype)
    mask, start = make_masks(kind), 0
    ours, reference = (OnlineAttention(query, NUM_HEADS, 0.3) for _ in range(2))
    monkeypatch.setattr(reference, "_by_flash", reference._by_products)
    for size in SIZES:
        keys, values = (torch.randn(2, NUM_HEADS, size, 32, dtype=dtype) for _ in range(2))
        for attention in (ours, reference):
            attention.add_tile(keys, values, slice_mask(mask, start, start + size))
        start += size
    assert ours.result().dtype == dtype
    torch.testing.assert_close(ours.result(), reference.result(), atol=TOLERANCE[dtype], rtol=0)


def test_who_may_attend_to_nothing_gets_zeros():
    query = torch.randn(1, 2, 17, 8)
    tile = DensePart(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), 5, torch.zeros(1, 1, 17, 5, dtype=torch.bool))
    assert choose_flash(query, 8)
    assert not attend(query, [tile, tile], 2, None).any()


def test_only_prompts_of_equal_head_dims_take_it(monkeypatch):
    assert not choose_flash(torch.randn(1, 2, 16, 8), 8)
    assert not choose_flash(torch.randn(1, 2, 17, 8), 12)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    assert not choose_flash(torch.randn(1, 2, 17, 8), 8)
