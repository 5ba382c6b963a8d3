"""Rows made dense and keys turned, compiled, against plain PyTorch."""

import pytest
import torch

from kvcache_plugins.ops.transform_coding.quantizers import QUANTIZERS
from kvcache_plugins.ops.transform_coding.rotary import candidate_layouts
from kvcache_plugins.ops.transform_coding.rows import RowTable
from kvcache_plugins.ops.transform_coding.turning import turn


pytest.importorskip("numba")
FREQUENCIES = tuple((10000.0 ** -(torch.arange(16) / 16)).tolist())


def make_table(quantizer: str, head_dim: int, *, has_order: bool, is_weighted: bool) -> RowTable:
    blocks = -(-head_dim // 8)
    widths = torch.stack([torch.tensor([6 - (i + head) % 7 for i in range(blocks)]) for head in range(2)])
    widths[1] = widths[1].flip(0)
    # Heads have rows of one size
    widths[1, 0] += widths[0].sum() - widths[1].sum()
    order = torch.stack([torch.randperm(head_dim) for _ in range(2)])[None].to(torch.uint8) if has_order else None
    return RowTable(
        order=order,
        mean=torch.randn(1, 2, head_dim).half() if has_order else None,
        deviation=torch.rand(1, 2, head_dim if has_order else 1).half() + 0.5,
        widths=widths[None].to(torch.uint8),
        row_size=1 + int(widths[0].sum()),
        head_dim=head_dim,
        is_weighted=is_weighted,
        quantizer=quantizer,
    )


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("has_order", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(("length", "head_dim"), [(1, 32), (300, 64), (63, 20)])
def test_rows_become_what_pytorch_makes_of_them(monkeypatch, quantizer, has_order, length, head_dim):
    torch.manual_seed(0)
    table = make_table(quantizer, head_dim, has_order=has_order, is_weighted=has_order)
    rows = table.encode(torch.randn(1, 2, length + 3, head_dim))[:, :, 3:]
    compiled = table.decode(rows), table.decode_rotated(rows)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    torch.testing.assert_close(compiled, (table.decode(rows), table.decode_rotated(rows)), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("number", range(len(candidate_layouts(FREQUENCIES, 48))))
@pytest.mark.parametrize("is_back", [True, False])
def test_keys_are_turned_as_in_pytorch(monkeypatch, number, is_back):
    layout = candidate_layouts(FREQUENCIES, 48)[number]
    keys, padding = torch.randn(2, 3, 100, 48).transpose(1, 2).contiguous().transpose(1, 2), torch.tensor([0, 70])
    compiled = turn(keys, layout, 40, padding, is_back=is_back)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    torch.testing.assert_close(compiled, turn(keys, layout, 40, padding, is_back=is_back), atol=3e-6, rtol=0)


def test_a_turn_is_told_by_the_position_alone():
    layout, keys = candidate_layouts(FREQUENCIES, 32)[0], torch.randn(1, 2, 90, 32)
    whole = turn(keys, layout, 5, None, is_back=True)
    part = turn(keys[:, :, 17:], layout, 30, torch.tensor([8]), is_back=True)
    assert torch.equal(part, whole[:, :, 17:])
