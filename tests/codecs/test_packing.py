"""Codes of any widths come back from rows, whose size is that of their bits."""

import pytest
import torch

from kvcache_plugins.codecs.quantizers import QUANTIZERS, block_offsets


LLOYD_MAX = QUANTIZERS["lloyd-max"]


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize(
    "widths",
    [[8, 8, 8], [0, 3, 1], [1, 0, 0], [5, 0, 7], [2, 2, 2]],
    ids=lambda widths: "".join(map(str, widths)),
)
def test_codes_come_back(widths, tokens):
    # Another head has the same widths elsewhere
    widths = torch.tensor([widths, widths[::-1]], dtype=torch.uint8).expand(2, 2, 3).contiguous()
    row_size = 1 + int(widths[0, 0].sum())
    codes = torch.randint(0, 256, (2, 2, tokens, 3, 8)) % (1 << widths.long())[:, :, None, :, None]
    scales = torch.randint(0, 256, (2, 2, tokens, 1), dtype=torch.uint8)
    rows = LLOYD_MAX.pack(codes, scales, widths, row_size)
    assert rows.shape == (2, 2, tokens, row_size) and rows.dtype == torch.uint8
    assert torch.equal(rows[..., :1], scales)
    assert torch.equal(LLOYD_MAX.unpack(rows, widths), codes)


def test_a_block_is_its_codes_lowest_bits_first():
    widths = torch.tensor([[[3, 1]]], dtype=torch.uint8)
    codes = torch.tensor([[7, 0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 1]])[None, None, None]
    rows = LLOYD_MAX.pack(codes, torch.zeros(1, 1, 1, 1, dtype=torch.uint8), widths, 5)
    assert rows.flatten().tolist() == [0, 0b00000111, 0, 0b00100000, 0b10000001]
    assert block_offsets(widths).tolist() == [[[1, 4]]]
