"""Attention over rows in calibrated bases by the C kernels, against plain PyTorch."""

import dataclasses

import pytest
import torch

from kvcache_plugins.codecs.allocation import allocate_widths, num_blocks
from kvcache_plugins.codecs.basis import round_basis
from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import CodedPart, DensePart
from kvcache_plugins.codecs.quantizers import QUANTIZERS
from kvcache_plugins.codecs.rope import RotaryLayout, candidate_layouts
from kvcache_plugins.codecs.rows import RowCodec, RowTable, SharedTables


TOLERANCE = 3e-5


def make_table(
    num_heads: int, head_dim: int, total: int, *, rope: RotaryLayout | None = None, quantizer: str = "lloyd-max"
) -> RowTable:
    scales = torch.logspace(0, -1.5, head_dim)
    basis = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim))[0] * scales[:, None]
    energies = torch.nn.functional.pad(scales.square(), (0, -head_dim % 8)).unflatten(0, (num_blocks(head_dim), 8))
    # Heads differ in how steeply their energies fall
    energies = torch.stack([energies.sum(dim=1) ** (1 + head) for head in range(num_heads)])
    # Values have a mean here, as what is compiled is to be right for any
    mean = torch.randn(num_heads, head_dim)
    factors = torch.rand(num_heads, head_dim) + 0.1
    errors = QUANTIZERS[quantizer].distortions
    widths = allocate_widths(energies[None], min(total, num_blocks(head_dim) * (len(errors) - 1)), errors)[0]
    own = round_basis(basis, factors)
    return RowTable.in_basis(mean.half(), factors, *own, widths, rope=rope, quantizer=quantizer)


def make_part(
    sizes,
    padding: list[int] | None = None,
    start: int = 4,
    layout: int = 0,
    quantizer: str = "lloyd-max",
) -> CodedPart:
    torch.manual_seed(0)
    batch_size, num_heads, length, key_dim, value_dim, key_total, value_total, _ = sizes
    rates = tuple((10000.0 ** -(torch.arange(key_dim // 2) * 2 / key_dim)).tolist())
    rope = candidate_layouts(rates, key_dim)[layout]
    tables = SharedTables(
        make_table(num_heads, key_dim, key_total, rope=rope, quantizer=quantizer),
        make_table(num_heads, value_dim, value_total, quantizer=quantizer),
    )
    codec = RowCodec(tables)
    keys, values = (torch.randn(batch_size, num_heads, length, size) for size in (key_dim, value_dim))
    shift = None if padding is None else torch.tensor(padding)
    positions = Positions(start, shift)
    return CodedPart(*codec.encode(keys, values, positions), codec, positions, length, None)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_attention_is_that_of_pytorch(attend_both, sizes, quantizer):
    expected, output = attend_both(sizes, [make_part(sizes, quantizer=quantizer)])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", [1, -1], ids=["interleaved", "none"])
def test_other_layouts(attend_both, wide, layout):
    expected, output = attend_both(wide, [make_part(wide, layout=layout)])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)


def test_padding_masks_exact_parts_and_spare_room(attend_both, wide):
    part = make_part(wide, padding=[0, 40])
    length = 101
    columns = torch.arange(length)
    mask = (columns >= torch.tensor([0, 36])[:, None])[:, None, None] & (torch.rand(2, 6, 4, length) > 0.2)
    masked = dataclasses.replace(part, length=length, mask=mask)
    exact = DensePart(torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64), 7, None)
    expected, output = attend_both(wide, [exact, masked])
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)
