"""Triton's attention over transform-coded rows against plain PyTorch, in Triton's interpreter or on a GPU."""

import dataclasses
import os

import pytest
import torch
from transformers import Cache

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.quantizers import QUANTIZERS
from kvcache_plugins.codecs.rope import apply_rope, candidate_layouts
from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.codecs.statistics import make_key_table, make_value_table
from kvcache_plugins.gear.kernel_check import plain_pytorch, require_close_layers
from kvcache_plugins.gear.transform.config import TransformConfig
from kvcache_plugins.gear.transform.layer import TransformLayer
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.row_attention import CodedPart, attend


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)
# Relative RMS error
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
# Batch size, heads, query heads a head, tokens, head dims of keys and values, sums of widths, queries
CASES = {
    "smollm2": (1, 3, 3, 65, 64, 64, 19, 16, 1),
    "one-token": (1, 1, 1, 1, 64, 64, 19, 16, 1),
    "widest": (2, 1, 2, 70, 64, 64, 64, 64, 4),
    "no-bits-for-most": (1, 1, 8, 70, 128, 128, 5, 3, 1),
    "least": (1, 2, 3, 63, 8, 8, 3, 3, 3),
    "unlike-dims": (1, 2, 4, 66, 80, 48, 30, 6, 5),
    "odd-dims": (1, 2, 1, 65, 20, 33, 24, 40, 16),
    "wide-order": (1, 1, 2, 40, 300, 256, 64, 64, 2),
    "splits": (1, 1, 3, 200, 16, 16, 5, 4, 1),
    # More rows than a program has
    "many-rows": (1, 1, 5, 67, 32, 32, 12, 8, 13),
}


def make_part(case, *, padding=None, start=4, layout="half-split", offset=0.0, quantizer="lloyd-max"):
    """Rows of random tokens, that begin at any byte of memory and end with it."""
    torch.manual_seed(0)
    batch_size, num_heads, _, length, key_dim, value_dim, key_total, value_total, _ = CASES[case]
    most = len(QUANTIZERS[quantizer].distortions) - 1
    key_total, value_total = (min(t, -(-d // 8) * most) for t, d in ((key_total, key_dim), (value_total, value_dim)))
    num_pairs = key_dim // 4 if layout == "partial" else key_dim // 2
    rates = tuple((10000.0 ** -(torch.arange(num_pairs) / num_pairs)).tolist())
    layouts = candidate_layouts(None if layout == "none" else rates, key_dim)
    layouts = [layouts[1 if layout == "interleaved" else 2 if layout == "partial" else 0]]
    keys = torch.randn(batch_size, num_heads, length, key_dim) * torch.rand(key_dim) + torch.randn(key_dim) + offset
    keys[..., key_dim // 2] = 1.5
    values = torch.randn(batch_size, num_heads, length, value_dim)
    shift = None if padding is None else torch.tensor(padding)
    keys = apply_rope(keys, layouts[0], Positions(start, shift))
    valid = torch.ones(batch_size, length, dtype=torch.bool)
    table = make_key_table(keys, valid, None, layouts, Positions(start, shift), key_total, quantizer)
    codec = RowCodec((table, make_value_table(values, valid, value_total, quantizer)))
    rows = codec.encode(keys, values, Positions(start, shift))
    rows = [torch.cat([each.new_zeros(3), each.flatten()])[3:].view_as(each).to(DEVICE) for each in rows]
    positions = Positions(start, None if shift is None else shift.to(DEVICE))
    return CodedPart(*rows, codec.map(lambda tensor: tensor.to(DEVICE)), positions, length, None)


def make_query(case):
    batch_size, num_heads, groups, _, key_dim, *_, num_queries = CASES[case]
    return torch.randn(batch_size, groups * num_heads, num_queries, key_dim, device=DEVICE)


def check(case, parts, dtype=torch.float32, query=None):
    query, num_heads = (make_query(case) if query is None else query).to(dtype), CASES[case][1]
    expected = attend(query.float(), iter(parts), num_heads, None, "torch")
    output = attend(query, iter(parts), num_heads, None, "triton")
    assert output.dtype == dtype and output.shape == expected.shape
    error = (output.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_pytorch(case):
    check(case, [make_part(case)])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["smollm2", "unlike-dims"])
def test_in_half_precision(case, dtype):
    check(case, [make_part(case)], dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["smollm2", "widest", "no-bits-for-most", "least"])
def test_trellis_codes(case, dtype):
    check(case, [make_part(case, quantizer="trellis")], dtype)


def test_means_of_values():
    part = make_part("unlike-dims")
    keys, values = part.codec.tables()
    mean = torch.randn(*part.values.shape[:2], values.head_dim, device=DEVICE)
    codec = RowCodec((keys, dataclasses.replace(values, mean=mean.half())))
    check("unlike-dims", [dataclasses.replace(part, codec=codec)])


@pytest.mark.parametrize("query_scale", [1e-6, 3e4])
def test_queries_of_any_size(query_scale):
    part, num_heads = make_part("least"), CASES["least"][1]
    # Large scores choose one key a query, and of two that are alike to bfloat16 rounding does: no such queries
    keys = part.codec.decode_keys(part.keys, part.positions)
    queries = torch.cat([make_query("least") for _ in range(3)], dim=2).unflatten(1, (num_heads, -1))
    largest, next_largest = (queries @ keys[:, :, None].mT).topk(2, dim=-1).values.unbind(dim=-1)
    order = ((largest - next_largest) / largest).argsort(dim=-1, descending=True)
    queries = queries.gather(3, order[..., :3, None].expand(*order.shape[:-1], 3, queries.shape[-1])).flatten(1, 2)
    check("least", [part], torch.bfloat16, query_scale * queries)


def test_means_much_larger_than_deviations():
    check("unlike-dims", [make_part("unlike-dims", offset=10.0)], torch.bfloat16)


@pytest.mark.parametrize("layout", ["interleaved", "partial", "none"])
def test_layouts(layout):
    check("least", [make_part("least", layout=layout)])


@pytest.mark.parametrize("start", [200, 70_001])
def test_positions_far_on(start):
    check("least", [make_part("least", start=start)])


@pytest.mark.parametrize("is_boolean", [True, False], ids=["boolean", "added"])
def test_padding_masks_and_exact_parts(is_boolean):
    part = make_part("widest", padding=[0, 40])
    columns = torch.arange(part.length)
    mask = (columns >= torch.tensor([0, 36])[:, None])[:, None, None] & (torch.rand(2, 2, 4, part.length) > 0.2)
    # A row that may attend to nothing coded
    mask[1, 0, 2] = False
    if not is_boolean:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    masked = dataclasses.replace(part, mask=mask.to(DEVICE))
    # Three of them: the first tokens, the buffer, and an update that has not been coded
    exact = [DensePart(*torch.randn(2, 2, 1, 9, 64, device=DEVICE), length, None) for length in (7, 9, 3)]
    check("widest", [exact[0], masked, *exact[1:]])


def test_masks_of_all_exact_parts():
    part = make_part("widest")
    masks = [torch.rand(2, 1, 4, length, device=DEVICE) > 0.5 for length in (7, 9, 3)]
    exact = [DensePart(*torch.randn(2, 2, 1, 9, 64, device=DEVICE), mask.shape[3], mask) for mask in masks]
    check("widest", [exact[0], part, *exact[1:]])


def test_several_coded_parts():
    part = make_part("many-rows")
    second = CodedPart(part.keys[:, :, 20:], part.values[:, :, 20:], part.codec, part.positions.after(20), 45, None)
    check("many-rows", [part, second, part])


def test_room_behind_the_rows_in_use_is_not_read():
    part = make_part("unlike-dims")
    shorter = dataclasses.replace(part, length=43)
    check("unlike-dims", [shorter])


def test_splits_are_merged(monkeypatch):
    monkeypatch.setattr("kvcache_plugins.triton_kernels.transform_coding.attend._MIN_TOKENS_PER_SPLIT", 64)
    check("splits", [make_part("splits")])


def test_layer_attends_with_it(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    config = TransformConfig(key_nbits=3, value_nbits=2.5)
    layer = TransformLayer(config, 0, frequencies=tuple((10000.0 ** -(torch.arange(8) / 8)).tolist()))
    for count in (90, 1):
        query = torch.randn(2, 4, count, 16, device=DEVICE)
        layer.update(*torch.randn(2, 2, 2, count, 16, device=DEVICE))
        output = layer.attend(AttentionCall(query, is_causal=count > 1))
    assert layer.stats()["fused_calls"] == 1 and layer.stats()["tokens_exact"] == 5
    with plain_pytorch():
        expected = layer.attend(AttentionCall(query))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    cache = Cache(layers=[layer])
    error = require_close_layers("gear-t22", cache, 4)
    assert error is not None and error < 1e-5
