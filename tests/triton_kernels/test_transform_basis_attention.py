"""Triton's attention over rows in calibrated bases against float64, in Triton's interpreter or on a GPU."""

import dataclasses
import os

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.allocation import allocate_widths, num_blocks
from kvcache_plugins.codecs.basis import round_basis
from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import CodedPart, DensePart
from kvcache_plugins.codecs.quantizers import QUANTIZERS
from kvcache_plugins.codecs.rope import candidate_layouts
from kvcache_plugins.codecs.rows import RowCodec, RowTable, SharedTables
from kvcache_plugins.kernels.attention import attend


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
    "smollm2": (1, 3, 3, 65, 64, 64, 14, 14, 1),
    "one-token": (1, 1, 1, 1, 64, 64, 19, 16, 1),
    "widest": (2, 1, 2, 70, 32, 32, 24, 24, 4),
    "no-bits-for-most": (1, 1, 8, 70, 64, 64, 5, 3, 1),
    "unlike-dims": (1, 2, 4, 66, 48, 16, 30, 6, 5),
    "odd-dims": (1, 2, 1, 65, 20, 33, 12, 20, 3),
}


def make_table(num_heads, head_dim, total, *, quantizer, rope=None):
    """Random bases, whose heads differ in how steeply their energies fall, and means on both sides."""
    scales = torch.logspace(0, -1.5, head_dim)
    basis = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim))[0] * scales[:, None]
    energies = F.pad(scales.square(), (0, -head_dim % 8)).unflatten(0, (num_blocks(head_dim), 8)).sum(dim=1)
    energies = torch.stack([energies ** (1 + head) for head in range(num_heads)])
    factors, errors = torch.rand(num_heads, head_dim) + 0.1, QUANTIZERS[quantizer].distortions
    widths = allocate_widths(energies[None], total, errors)[0]
    own = round_basis(basis, factors)
    mean = torch.randn(num_heads, head_dim).half()
    return RowTable.in_basis(mean, factors, *own, widths, rope=rope, quantizer=quantizer)


def make_part(case, *, padding=None, start=4, layout=0, quantizer="lloyd-max"):
    """Rows of random tokens, that begin at any byte of memory and end with it."""
    torch.manual_seed(0)
    batch_size, num_heads, _, length, key_dim, value_dim, key_total, value_total, _ = CASES[case]
    rates = tuple((10000.0 ** -(torch.arange(key_dim // 2) * 2 / key_dim)).tolist())
    rope = candidate_layouts(rates, key_dim)[layout]
    keys = make_table(num_heads, key_dim, key_total, quantizer=quantizer, rope=rope)
    codec = RowCodec(SharedTables(keys, make_table(num_heads, value_dim, value_total, quantizer=quantizer)))
    states = (torch.randn(batch_size, num_heads, length, dim) for dim in (key_dim, value_dim))
    shift = None if padding is None else torch.tensor(padding)
    rows = codec.encode(*states, Positions(start, shift))
    rows = [torch.cat([each.new_zeros(3), each.flatten()])[3:].view_as(each).to(DEVICE) for each in rows]
    positions = Positions(start, None if shift is None else shift.to(DEVICE))
    return CodedPart(*rows, codec, positions, length, None)


def check(case, parts, dtype=torch.float32):
    batch_size, num_heads, groups, _, key_dim, *_, num_queries = CASES[case]
    query = torch.randn(batch_size, groups * num_heads, num_queries, key_dim, device=DEVICE).to(dtype)
    output = attend(query, iter(parts), num_heads, None, "triton")
    tiles = [tile for part in parts for tile in (part.tiles() if isinstance(part, CodedPart) else (part,))]
    keys, values = (
        torch.cat([getattr(tile, side)[:, :, : tile.length].double() for tile in tiles], dim=2)
        for side in ("keys", "values")
    )
    expected = F.scaled_dot_product_attention(query.double(), keys, values, enable_gqa=True)
    assert output.dtype == dtype and output.shape == expected.shape
    error = (output.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCE[dtype], error


@pytest.mark.each_value
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_float64(case, quantizer):
    check(case, [make_part(case, quantizer=quantizer)])


@pytest.mark.each_value
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision(dtype, quantizer):
    check("unlike-dims", [make_part("unlike-dims", quantizer=quantizer)], dtype)


@pytest.mark.parametrize("layout", [1, -1], ids=["interleaved", "none"])
def test_layouts(layout):
    check("widest", [make_part("widest", layout=layout)])


def test_padding_exact_parts_and_room_behind_the_rows():
    part = make_part("widest", padding=[0, 40], start=300)
    cut = dataclasses.replace(part, length=43)
    exact = [DensePart(*torch.randn(2, 2, 1, 9, 32, device=DEVICE), length, None) for length in (7, 9)]
    check("widest", [exact[0], cut, exact[1]])


def test_length_on_the_device():
    part = make_part("widest", padding=[0, 40], start=300)
    exact = DensePart(*torch.randn(2, 2, 1, 9, 32, device=DEVICE), 9, None)
    counts = [torch.tensor([count], device=DEVICE) for count in (43, 7)]
    batch_size, num_heads, groups, _, key_dim, *_, num_queries = CASES["widest"]
    query = torch.randn(batch_size, groups * num_heads, num_queries, key_dim, device=DEVICE)
    cut = [dataclasses.replace(each, length=int(count)) for each, count in zip((part, exact), counts, strict=True)]
    read = [dataclasses.replace(each, num_tokens=count) for each, count in zip((part, exact), counts, strict=True)]
    output, expected = (attend(query, iter(parts), num_heads, None, "triton") for parts in (read, cut))
    torch.testing.assert_close(output, expected)
