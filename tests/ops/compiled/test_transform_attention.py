"""Compiled attention over transform-coded rows, and compiled coding, against plain PyTorch."""

import pytest
import torch

from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.rotation import rotate
from kvcache_plugins.ops.transform_coding.attention import attend
from kvcache_plugins.ops.transform_coding.parts import CodedPart, RowCoder
from kvcache_plugins.ops.transform_coding.quantizers import QUANTIZERS
from kvcache_plugins.ops.transform_coding.rotary import candidate_layouts
from kvcache_plugins.ops.transform_coding.statistics import Angles, make_key_table, make_value_table


pytest.importorskip("numba")
TOLERANCE = 2e-5
# Batch size, heads, tokens, head dims of keys and values, sums of widths, queries
CASES = {
    "smollm2": (1, 3, 1000, 64, 64, 19, 16, 1),
    "one-token": (1, 1, 1, 64, 64, 19, 16, 1),
    "wide": (2, 2, 129, 64, 64, 60, 40, 4),
    "no-bits-for-most": (1, 1, 70, 128, 128, 5, 3, 1),
    "least": (1, 2, 63, 8, 8, 3, 3, 3),
    "unlike-dims": (2, 2, 131, 80, 48, 30, 6, 5),
    "odd-dims": (1, 2, 65, 20, 33, 24, 40, 16),
    "large": (1, 1, 200, 300, 256, 64, 64, 2),
    # Beyond the tiles after which queries are turned back anew
    "long": (1, 1, 5000, 32, 32, 12, 8, 1),
}


def make_part(
    case: str, padding: list[int] | None = None, start: int = 4, frequencies: bool = True, quantizer: str = "lloyd-max"
) -> CodedPart:
    torch.manual_seed(0)
    batch_size, num_heads, length, key_dim, value_dim, key_total, value_total, _ = CASES[case]
    if quantizer == "trellis":
        key_total, value_total = min(key_total, -(-key_dim // 8) * 6), min(value_total, -(-value_dim // 8) * 6)
    rates = tuple((10000.0 ** -(torch.arange(key_dim // 2) * 2 / key_dim)).tolist())
    layouts = candidate_layouts(rates if frequencies else None, key_dim)[:1]
    keys = torch.randn(batch_size, num_heads, length, key_dim) * torch.rand(key_dim) + torch.randn(key_dim)
    keys[..., key_dim // 2] = 1.5
    values = torch.randn(batch_size, num_heads, length, value_dim)
    shift = None if padding is None else torch.tensor(padding)
    at = [Angles.at(layouts[0], start, length, shift, keys.device)]
    keys = layouts[0].rotate(keys, at[0].cosines, at[0].sines)
    valid = torch.ones(batch_size, length, dtype=torch.bool)
    table, _ = make_key_table(keys, valid, None, layouts, at, key_total, quantizer)
    coder = RowCoder(table, make_value_table(rotate(values), valid, value_total, quantizer), layouts[0])
    rows = coder.encode(keys, values, start, shift)
    return CodedPart(*rows, coder, start, shift, length, None)


def both(monkeypatch, case, parts):
    batch_size, num_heads, _, key_dim, *_, num_queries = CASES[case]
    query = torch.randn(batch_size, 3 * num_heads, num_queries, key_dim)
    outputs = {}
    for kernel in ("torch", "compiled"):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        outputs[kernel] = attend(query, iter(parts), num_heads, None, kernel)
    return outputs["torch"], outputs["compiled"]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_pytorch(monkeypatch, case, quantizer):
    expected, output = both(monkeypatch, case, [make_part(case, quantizer=quantizer)])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


def test_without_rotary_embedding(monkeypatch):
    expected, output = both(monkeypatch, "wide", [make_part("wide", frequencies=False)])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("is_boolean", [True, False], ids=["boolean", "added"])
def test_padding_masks_and_exact_parts(monkeypatch, is_boolean):
    part = make_part("wide", padding=[0, 40])
    columns = torch.arange(part.length)
    mask = (columns >= torch.tensor([0, 36])[:, None])[:, None, None] & (torch.rand(2, 6, 4, part.length) > 0.2)
    if not is_boolean:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    masked = CodedPart(part.keys, part.values, part.coder, part.start, part.padding, part.length, mask)
    exact = DensePart(torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64), 7, None)
    expected, output = both(monkeypatch, "wide", [exact, masked])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


def test_room_behind_the_rows_in_use_is_not_read(monkeypatch):
    part = make_part("wide")
    shorter = CodedPart(part.keys, part.values, part.coder, part.start, None, 77, None)
    cut = CodedPart(part.keys[:, :, :77], part.values[:, :, :77], part.coder, part.start, None, 77, None)
    expected, output = both(monkeypatch, "wide", [shorter])
    again = both(monkeypatch, "wide", [cut])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)
    assert again[0].shape == output.shape


def test_several_threads_compute_the_same(monkeypatch):
    part = make_part("long")
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
