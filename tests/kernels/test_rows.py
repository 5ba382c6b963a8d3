"""Attention over transform-coded rows by the C kernels, against plain PyTorch."""

import dataclasses

import pytest
import torch

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import CodedPart, DensePart
from kvcache_plugins.codecs.quantizers import QUANTIZERS
from kvcache_plugins.codecs.rope import apply_rope, candidate_layouts
from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.codecs.statistics import make_key_table, make_value_table
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.compiled import call_of


TOLERANCE = 2e-5


def make_part(
    sizes, padding: list[int] | None = None, start: int = 4, frequencies: bool = True, quantizer: str = "lloyd-max"
) -> CodedPart:
    torch.manual_seed(0)
    batch_size, num_heads, length, key_dim, value_dim, key_total, value_total, _ = sizes
    if quantizer == "trellis":
        key_total, value_total = min(key_total, -(-key_dim // 8) * 6), min(value_total, -(-value_dim // 8) * 6)
    rates = tuple((10000.0 ** -(torch.arange(key_dim // 2) * 2 / key_dim)).tolist())
    layouts = candidate_layouts(rates if frequencies else None, key_dim)[:1]
    keys = torch.randn(batch_size, num_heads, length, key_dim) * torch.rand(key_dim) + torch.randn(key_dim)
    keys[..., key_dim // 2] = 1.5
    values = torch.randn(batch_size, num_heads, length, value_dim)
    shift = None if padding is None else torch.tensor(padding)
    positions = Positions(start, shift)
    keys = apply_rope(keys, layouts[0], positions)
    valid = torch.ones(batch_size, length, dtype=torch.bool)
    table = make_key_table(keys, valid, None, layouts, positions, key_total, quantizer)
    codec = RowCodec((table, make_value_table(values, valid, value_total, quantizer)))
    return CodedPart(*codec.encode(keys, values, positions), codec, positions, length, None)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_attention_is_that_of_pytorch(attend_both, sizes, quantizer):
    expected, output = attend_both(sizes, [make_part(sizes, quantizer=quantizer)])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


def test_without_rotary_embedding(attend_both, wide):
    expected, output = attend_both(wide, [make_part(wide, frequencies=False)])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_boolean", [True, False], ids=["boolean", "added"])
def test_padding_masks_and_exact_parts(attend_both, wide, is_boolean):
    part = make_part(wide, padding=[0, 40])
    columns = torch.arange(part.length)
    mask = (columns >= torch.tensor([0, 36])[:, None])[:, None, None] & (torch.rand(2, 6, 4, part.length) > 0.2)
    if not is_boolean:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    masked = dataclasses.replace(part, mask=mask)
    exact = DensePart(torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64), 7, None)
    expected, output = attend_both(wide, [exact, masked])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


def test_room_behind_the_rows_in_use_is_not_read(attend_both, wide):
    part = make_part(wide)
    shorter = dataclasses.replace(part, length=77)
    cut = dataclasses.replace(shorter, keys=part.keys[:, :, :77], values=part.values[:, :, :77])
    expected, output = attend_both(wide, [shorter])
    again = attend_both(wide, [cut])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)
    assert again[0].shape == output.shape


def test_several_threads_compute_the_same(monkeypatch, long):
    part = make_part(long)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")
    query, before = torch.randn(1, 3, 1, 32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = attend(query, iter([part]), 1, None, "compiled")
        torch.set_num_threads(2)
        double = attend(query, iter([part]), 1, None, "compiled")
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(double, single, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_of_other_dtypes(wide, level, dtype):
    part = make_part(wide)
    query = torch.randn(2, 6, 4, 64).to(dtype)
    expected = attend(query.float(), iter([part]), 2, None, "torch")
    output = attend(query, iter([part]), 2, None, "compiled")
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected.to(dtype), atol=TOLERANCE, rtol=torch.finfo(dtype).eps)


def test_a_prepared_call_attends_to_tokens_to_come(wide, level):
    part = make_part(wide, padding=[0, 40])
    keys, values = torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64)
    query = torch.randn(2, 6, 4, 64)
    call = call_of(query, [part, DensePart(keys, values, 1, None)], 2, 0.125).prepare()
    for length in (2, 3, 9):
        query = torch.randn(2, 6, 4, 64)
        newest = torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64)
        output = call.attend(query, 0.125, (keys, values), length, call.accept(*newest))
        assert torch.equal(keys[:, :, length - 1 : length], newest[0])
        expected = attend(query, iter([part, DensePart(keys, values, length, None)]), 2, 0.125, "torch")
        torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)
    for wrong in (newest[0].half(), newest[0][:1], torch.zeros(2, 2, 1, 128)[..., ::2]):
        assert call.accept(wrong, wrong) is None
        with pytest.raises(ValueError, match="newest"):
            call.attend(query, 0.125, (keys, values), 9, (wrong, wrong))
    with pytest.raises(ValueError, match="in use"):
        call.attend(query, 0.125, (keys, values), 10, None)
    # Others than it was prepared for
    assert call.attend(query, 0.5, (keys, values), 9, None) is None
    assert call.attend(query.half(), 0.125, (keys, values), 9, None) is None


def test_copies_are_not_prepared(wide):
    part = make_part(wide)
    cut = dataclasses.replace(part, keys=part.keys[:, :, :77], length=77)
    exact = DensePart(torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64), 1, None)
    assert call_of(torch.randn(2, 6, 4, 64), [cut, exact], 2, 0.125).prepare() is None


@pytest.mark.parametrize("widths", [8, 9, 255])
def test_forged_tables_touch_nothing_else(wide, level, widths):
    part = make_part(wide)
    keys, values = (
        dataclasses.replace(table, widths=torch.full_like(table.widths, widths)) for table in part.codec.tables()
    )
    keys = dataclasses.replace(keys, order=torch.full_like(keys.order, 255))
    forged = dataclasses.replace(part, codec=RowCodec((keys, values)))
    assert attend(torch.randn(2, 6, 4, 64), iter([forged]), 2, None, "compiled").isfinite().all()


def test_sizes_that_do_not_fit_are_refused(wide):
    part, query = make_part(wide), torch.randn(2, 6, 4, 64)
    table, values = part.codec.tables()
    few = dataclasses.replace(table, widths=table.widths[:, :, :1])
    few_values = dataclasses.replace(values, widths=values.widths[:, :, :1])
    no_mean = dataclasses.replace(table, mean=table.mean[:, :1])
    for wrong in (
        dataclasses.replace(part, length=part.length + 1),
        dataclasses.replace(part, keys=part.keys[:1]),
        dataclasses.replace(part, keys=part.keys.short()),
        *(
            dataclasses.replace(part, codec=RowCodec(tables))
            for tables in ((few, values), (table, few_values), (no_mean, values))
        ),
    ):
        with pytest.raises(ValueError):
            attend(query, iter([wrong]), 2, None, "compiled")
    with pytest.raises(ValueError):
        attend(torch.randn(2, 6, 4, 32), iter([part]), 2, None, "compiled")
