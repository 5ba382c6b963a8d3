"""Triton's kernels over rows, of prompts' tables and of calibrated bases: attention and coding against plain PyTorch.

They run in Triton's interpreter or on a GPU, or compiled in an emulator: `test_executed.py`.
"""

import dataclasses
import os

import pytest
import torch
import torch.nn.functional as F
from transformers import Cache

from kvcache_plugins.codecs.basis import round_basis
from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import CodedPart, DensePart
from kvcache_plugins.codecs.prompt_codec import allocate_widths, make_key_table, make_value_table
from kvcache_plugins.codecs.quantizers import QUANTIZERS, num_blocks, thresholds
from kvcache_plugins.codecs.rope import apply_rope, candidate_layouts
from kvcache_plugins.codecs.rows import RowCodec, RowTable, SharedTables
from kvcache_plugins.gear.kernel_check import plain_pytorch, require_close_layers
from kvcache_plugins.gear.transform.config import TransformConfig
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.triton import codebook_of
from kvcache_plugins.layers.compressed_layer import CompressedLayer


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)
# Of attention: relative RMS error
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
# Of coding: rows that may differ, where a number lies at a bound to rounding or a scale between two steps; and their
# decoded error, relative
MOST_DIFFERENT, SAME_ERROR = 0.005, 1e-3
HALVES = [torch.float16, torch.bfloat16]
LAYOUTS = ["interleaved", "partial", "none"]
# Of attention: batch size, heads, query heads a head, tokens, head dims of keys and values, sums of widths, queries
PROMPTS = {
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
BASES = {
    "basis-smollm2": (1, 3, 3, 65, 64, 64, 14, 14, 1),
    "basis-one-token": (1, 1, 1, 1, 64, 64, 19, 16, 1),
    "basis-widest": (2, 1, 2, 70, 32, 32, 24, 24, 4),
    "basis-no-bits-for-most": (1, 1, 8, 70, 64, 64, 5, 3, 1),
    "basis-unlike-dims": (1, 2, 4, 66, 48, 16, 30, 6, 5),
    "basis-odd-dims": (1, 2, 1, 65, 20, 33, 12, 20, 3),
}
ATTENTION = {**PROMPTS, **BASES}
# Of coding: batch size, heads, tokens, head dim, sums of widths of keys and values
CODING = {
    "t25-d64": (1, 1, 33, 64, 32, 26),
    "t16-d64": (2, 1, 11, 64, 19, 16),
    "t22-d128": (1, 1, 9, 128, 56, 44),
    "t30-d256": (1, 1, 5, 256, 128, 100),
    "one-token": (1, 1, 1, 64, 19, 16),
    "d80": (1, 2, 7, 80, 40, 30),
    "d96": (1, 1, 9, 96, 48, 36),
    "odd-dim": (1, 2, 19, 33, 20, 13),
    "least": (1, 1, 70, 8, 3, 3),
    "widest": (1, 1, 18, 32, 32, 32),
    "most-without-bits": (1, 1, 7, 128, 5, 3),
    "many": (2, 2, 129, 64, 32, 26),
    "basis-d64": (1, 2, 17, 64, 18, 14),
    "basis-one-token": (1, 1, 1, 64, 18, 14),
    "basis-d128": (1, 1, 17, 128, 56, 44),
    "basis-d80": (2, 1, 11, 80, 30, 20),
    "basis-odd-dim": (1, 2, 19, 20, 12, 9),
    "basis-d256": (1, 1, 9, 256, 60, 60),
    "basis-many": (2, 2, 129, 64, 30, 24),
}


def make_layout(head_dim, name):
    num_pairs = head_dim // 4 if name == "partial" else head_dim // 2
    rates = tuple((10000.0 ** -(torch.arange(num_pairs) / max(num_pairs, 1))).tolist())
    layouts = candidate_layouts(None if name == "none" else rates, head_dim)
    return layouts[{"interleaved": 1, "partial": 2}.get(name, 0)]


def make_basis_table(num_heads, head_dim, total, quantizer, rope=None):
    """Random bases, whose heads differ in how steeply their energies fall, and means."""
    scales = torch.logspace(0, -1.5, head_dim)
    basis = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim))[0] * scales[:, None]
    energies = F.pad(scales.square(), (0, -head_dim % 8)).unflatten(0, (num_blocks(head_dim), 8)).sum(dim=1)
    energies = torch.stack([energies ** (1 + head) for head in range(num_heads)])
    factors = torch.rand(num_heads, head_dim) + 0.1
    widths = allocate_widths(energies[None], total, QUANTIZERS[quantizer].distortions)[0]
    own = round_basis(basis, factors)
    return RowTable.in_basis(
        torch.randn(num_heads, head_dim).half(), factors, *own, widths, rope=rope, quantizer=quantizer
    )


def make_codec(case, keys, values, totals, layout, positions, quantizer="lloyd-max"):
    """The tables of random states, or random ones of a calibration."""
    rope = make_layout(keys.shape[3], layout)
    most = len(QUANTIZERS[quantizer].distortions) - 1
    totals = [
        min(total, num_blocks(states.shape[3]) * most) for total, states in zip(totals, (keys, values), strict=True)
    ]
    if case.startswith("basis"):
        tables = [
            make_basis_table(keys.shape[1], states.shape[3], total, quantizer, own)
            for states, total, own in zip((keys, values), totals, (rope, None), strict=True)
        ]
        return RowCodec(SharedTables(*tables))
    valid = torch.ones(keys.shape[::2], dtype=torch.bool)
    table = make_key_table(keys, valid, None, [rope], positions, totals[0], quantizer)
    return RowCodec((table, make_value_table(values, valid, totals[1], quantizer)))


def make_part(case, *, padding=None, start=4, layout="half-split", offset=0.0, quantizer="lloyd-max"):
    """Rows of random tokens, that begin at any byte of memory and end with it."""
    torch.manual_seed(0)
    batch_size, num_heads, _, length, key_dim, value_dim, *totals, _ = ATTENTION[case]
    positions = Positions(start, None if padding is None else torch.tensor(padding))
    keys = torch.randn(batch_size, num_heads, length, key_dim) * torch.rand(key_dim) + torch.randn(key_dim) + offset
    keys[..., key_dim // 2] = 1.5
    keys = apply_rope(keys, make_layout(key_dim, layout), positions)
    values = torch.randn(batch_size, num_heads, length, value_dim)
    codec = make_codec(case, keys, values, totals, layout, positions, quantizer)
    rows = codec.encode(keys, values, positions)
    rows = [torch.cat([each.new_zeros(3), each.flatten()])[3:].view_as(each).to(DEVICE) for each in rows]
    if case in PROMPTS:
        codec = codec.map(lambda tensor: tensor.to(DEVICE))
    positions = Positions(start, None if padding is None else positions.padding.to(DEVICE))
    return CodedPart(*rows, codec, positions, length, None)


def make_query(case):
    batch_size, num_heads, groups, _, key_dim, *_, num_queries = ATTENTION[case]
    return torch.randn(batch_size, groups * num_heads, num_queries, key_dim, device=DEVICE)


def check_attention(case, parts, dtype=torch.float32, query=None):
    query, num_heads = (make_query(case) if query is None else query).to(dtype), ATTENTION[case][1]
    if case in BASES:
        # Channels of PyTorch's own attention over rows are rounded products: dense states in float64 are not
        tiles = [tile for part in parts for tile in part.tiles()]
        keys, values = (torch.cat([tile[side].double() for tile in tiles], dim=2) for side in (0, 1))
        expected = F.scaled_dot_product_attention(query.double(), keys, values, enable_gqa=True)
    else:
        expected = attend(query.float(), iter(parts), num_heads, None, "torch")
    output = attend(query, iter(parts), num_heads, None, "triton")
    assert output.dtype == dtype and output.shape == expected.shape
    error = (output.to(expected.dtype) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_that_of_pytorch(case):
    check_attention(case, [make_part(case)])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ["smollm2", "unlike-dims", "basis-unlike-dims"])
def test_attention_in_half_precision(case, dtype):
    check_attention(case, [make_part(case)], dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["smollm2", "widest", "no-bits-for-most", "least", *BASES])
def test_trellis_codes(case, dtype):
    check_attention(case, [make_part(case, quantizer="trellis")], dtype)


def test_means_of_values():
    part = make_part("unlike-dims")
    keys, values = part.codec.tables()
    mean = torch.randn(*part.values.shape[:2], values.head_dim, device=DEVICE)
    codec = RowCodec((keys, dataclasses.replace(values, mean=mean.half())))
    check_attention("unlike-dims", [dataclasses.replace(part, codec=codec)])


@pytest.mark.parametrize("query_scale", [1e-6, 3e4])
def test_queries_of_any_size(query_scale):
    part, num_heads = make_part("least"), ATTENTION["least"][1]
    # Large scores choose one key a query, and of two that are alike to bfloat16 rounding does: no such queries
    keys = part.codec.decode_keys(part.keys, part.positions)
    queries = torch.cat([make_query("least") for _ in range(3)], dim=2).unflatten(1, (num_heads, -1))
    largest, next_largest = (queries @ keys[:, :, None].mT).topk(2, dim=-1).values.unbind(dim=-1)
    order = ((largest - next_largest) / largest).argsort(dim=-1, descending=True)
    queries = queries.gather(3, order[..., :3, None].expand(*order.shape[:-1], 3, queries.shape[-1])).flatten(1, 2)
    check_attention("least", [part], torch.bfloat16, query_scale * queries)


@pytest.mark.parametrize(
    ("case", "options", "length", "dtype"),
    [
        *((case, {"layout": layout}, None, torch.float32) for case in ("least", "basis-widest") for layout in LAYOUTS),
        *(("least", {"start": start}, None, torch.float32) for start in (200, 70_001)),
        # Means much larger than deviations
        ("unlike-dims", {"offset": 10.0}, None, torch.bfloat16),
        # Capacity behind the rows in use
        ("unlike-dims", {}, 43, torch.float32),
    ],
    ids=str,
)
def test_attention_to_other_keys(case, options, length, dtype):
    part = make_part(case, **options)
    check_attention(case, [dataclasses.replace(part, length=length or part.length)], dtype)


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
    check_attention("widest", [exact[0], masked, *exact[1:]])


def test_padding_exact_parts_and_capacity_behind_the_rows_of_a_basis():
    part = dataclasses.replace(make_part("basis-widest", padding=[0, 40], start=300), length=43)
    exact = [DensePart(*torch.randn(2, 2, 1, 9, 32, device=DEVICE), length, None) for length in (7, 9)]
    check_attention("basis-widest", [exact[0], part, exact[1]])


def test_masks_of_all_exact_parts():
    part = make_part("widest")
    masks = [torch.rand(2, 1, 4, length, device=DEVICE) > 0.5 for length in (7, 9, 3)]
    exact = [DensePart(*torch.randn(2, 2, 1, 9, 64, device=DEVICE), mask.shape[3], mask) for mask in masks]
    check_attention("widest", [exact[0], part, *exact[1:]])


def test_several_coded_parts():
    part = make_part("many-rows")
    second = CodedPart(part.keys[:, :, 20:], part.values[:, :, 20:], part.codec, part.positions.after(20), 45, None)
    check_attention("many-rows", [part, second, part])


def test_splits_are_merged(monkeypatch):
    monkeypatch.setattr("kvcache_plugins.triton_kernels.transform_coding.attend._MIN_TOKENS_PER_SPLIT", 64)
    check_attention("splits", [make_part("splits")])


@pytest.mark.parametrize("case", ["widest", "basis-widest"])
def test_lengths_on_the_device(case):
    part, query = make_part(case, padding=[0, 40], start=300), make_query(case)
    exact = DensePart(*torch.randn(2, 2, 1, 9, query.shape[3], device=DEVICE), 9, None)
    cut = dataclasses.replace(part, length=43)
    read = dataclasses.replace(part, num_tokens=torch.tensor([43], device=DEVICE))
    output, expected = (attend(query, [each, exact], ATTENTION[case][1], None, "triton") for each in (read, cut))
    torch.testing.assert_close(output, expected)


def test_layer_attends_with_it(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    config = TransformConfig(key_nbits=3, value_nbits=2.5)
    layer = CompressedLayer(config.packing(tuple((10000.0 ** -(torch.arange(8) / 8)).tolist())), 0)
    for count in (90, 1):
        query = torch.randn(2, 4, count, 16, device=DEVICE)
        layer.update(*torch.randn(2, 2, 2, count, 16, device=DEVICE))
        output = layer.attend(AttentionCall(query, is_causal=count > 1))
    assert layer.stats()["fused_calls"] == 1 and layer.stats()["tokens_exact"] == 5
    with plain_pytorch():
        expected = layer.attend(AttentionCall(query))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    error = require_close_layers("gear-t22", Cache(layers=[layer]), 4)
    assert error is not None and error < 1e-5


def make_states(case, dtype=torch.float32, *, layout="half-split", start=4, padding=None, offset=1.0):
    """Random keys and values of tokens, laid out as a model lays them out, and their codec."""
    torch.manual_seed(0)
    batch_size, num_heads, length, head_dim, *totals = CODING[case]
    keys, values = torch.randn(2, batch_size, length, num_heads, head_dim).transpose(2, 3)
    keys = keys * torch.logspace(-1.5, 0.5, head_dim)[torch.randperm(head_dim)] + offset * torch.randn(head_dim)
    values = values * torch.randn(batch_size, num_heads, length, 1).exp()
    positions = Positions(start, padding)
    keys = apply_rope(keys, make_layout(head_dim, layout), positions).to(dtype)
    codec = make_codec(case, keys, values, totals, layout, positions)
    # Heads of a token one behind the other, and a token that is left out before them
    keys, values = (
        torch.cat([states[:, :, :1], states], dim=2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, 1:].to(DEVICE)
        for states in (keys, values.to(dtype))
    )
    if case.startswith("basis"):
        # A token of which one channel is far larger than all others
        keys[:, :, length // 2, 5] *= 100
        values[:, :, length // 2, 5] *= 100
    else:
        codec = codec.map(lambda tensor: tensor.to(DEVICE))
    return keys, values, codec, positions


def encode(keys, values, codec, positions):
    """Rows of both sides by the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        return codec.encode(keys, values, positions)


def check_coding(keys, values, codec, positions):
    """Compares rows and what they decode to."""
    rows = encode(keys, values, codec, positions)
    with plain_pytorch():
        expected = codec.encode(keys.float(), values.float(), positions)
        for number, (own, other) in enumerate(zip(rows, expected, strict=True)):
            assert own.dtype == torch.uint8 and own.shape == other.shape
            num_different = int((own != other).any(dim=-1).sum())
            assert num_different <= MOST_DIFFERENT * own[..., 0].numel() + (num_different == 1), number
            states = (values if number else keys).float()
            error, known = (
                (codec.decode_values(each) if number else codec.decode_keys(each, positions)) - states
                for each in (own, other)
            )
            torch.testing.assert_close(error.norm(), known.norm(), rtol=SAME_ERROR, atol=1e-6)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case.endswith("many") else case for case in CODING]
)
def test_rows_are_those_of_pytorch(case):
    check_coding(*make_states(case))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ["t16-d64", "d80", "t30-d256", "basis-d64"])
def test_coding_in_half_precision(case, dtype):
    check_coding(*make_states(case, dtype))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((case, {"layout": layout}) for case in ("t16-d64", "basis-odd-dim") for layout in LAYOUTS),
        *(("t25-d64", {"start": start}) for start in (0, 70_001)),
        ("t16-d64", {"padding": torch.tensor([0, 7])}),
        ("basis-d80", {"padding": torch.tensor([0, 7]), "start": 300}),
        # Means much larger than deviations
        ("t25-d64", {"offset": 20.0}),
    ],
    ids=str,
)
def test_coding_of_other_keys(case, options):
    check_coding(*make_states(case, **options))


def test_channels_that_do_not_vary_and_tokens_of_zeros():
    keys, values, codec, positions = make_states("t16-d64")
    codec.tables()[0].deviation[:, :, 3] = 0
    keys[:, :, 7], values[:, :, 7] = 0, 0
    check_coding(keys, values, codec, positions)


@pytest.mark.parametrize("factor", [1e-8, 1e6])
def test_tokens_beyond_what_scales_reach(factor):
    keys, values, codec, positions = make_states("t16-d64")
    values[:, :, 5] *= factor
    check_coding(keys, values, codec, positions)


def test_what_is_not_finite_stays_in_its_row():
    keys, values, codec, positions = make_states("t16-d64")
    known = encode(keys, values, codec, positions)
    for states in (keys, values):
        states[0, 0, 7], states[1, 0, 8, 3], states[1, 0, 9, 3] = torch.nan, torch.inf, -torch.inf
    rows = encode(keys, values, codec, positions)
    for own, other in zip(rows, known, strict=True):
        own[0, 0, 7], own[1, 0, 8:10] = other[0, 0, 7], other[1, 0, 8:10]
        assert torch.equal(own, other)


def test_no_tokens():
    keys, values, codec, positions = make_states("t16-d64")
    rows = encode(keys[:, :, :0], values[:, :, :0], codec, positions)
    assert [each.shape for each in rows] == [(2, 1, 0, size) for size in codec.row_sizes]


def test_no_cell_has_two_bounds():
    book, bounds = codebook_of(True, torch.device("cpu")), thresholds(torch.device("cpu"))
    assert torch.equal(book.cell_bounds.isfinite().sum(dim=1), bounds.isfinite().sum(dim=1))


@pytest.mark.parametrize("width", range(9))
def test_codes_at_the_bounds_are_those_of_pytorch(width):
    book, bounds = codebook_of(True, torch.device("cpu")), thresholds(torch.device("cpu"))[width]
    ends = torch.arange(-300, 301) / 64
    near = torch.cat([bounds[bounds.isfinite()], ends])
    numbers = torch.cat([near, near.nextafter(near + 1), near.nextafter(near - 1), torch.tensor([torch.inf, 100.0])])
    # What the kernel does with them
    cells = ((numbers.clamp(-4.5, 4.5) + 4.5) * 64).int()
    codes = book.cell_codes[width, cells].int() + (numbers > book.cell_bounds[width, cells]).int()
    assert torch.equal(codes.long(), torch.searchsorted(bounds, numbers))
