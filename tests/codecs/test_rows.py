"""Tokens coded and decoded: errors are those that the widths promise, for every token independently."""

import pytest
import torch

from kvcache_plugins.codecs.prompt_codec import make_key_format, make_value_format
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.quantizer import DISTORTIONS
from kvcache_plugins.formats.rotary import RotaryLayout
from kvcache_plugins.formats.rows import RowFormat
from kvcache_plugins.kernels.ops import decode_rows, encode_rows


def value_table(values: torch.Tensor, total: int) -> RowFormat:
    return make_value_format(values, torch.ones(values.shape[0], values.shape[2], dtype=torch.bool), total)


@pytest.fixture(autouse=True)
def in_pytorch(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6])
def test_value_error_matches_the_distortion_of_its_width(width):
    values = torch.randn(1, 2, 3000, 64) * 3
    table = value_table(values, 8 * width)
    rows = encode_rows(values, table)
    error = (decode_rows(rows, table) - values).square().mean() / values.square().mean()
    # Not shrunk, they lose less in the mean and more in spread
    distortion = DISTORTIONS[width]
    assert float(error) == pytest.approx(distortion / (1 - distortion), rel=0.15)


@pytest.mark.parametrize("total", [11, 16, 24])
def test_values_do_not_shrink(total):
    values = torch.randn(1, 1, 2000, 64) * torch.randn(1, 1, 2000, 1).exp()
    table = value_table(values, total)
    decoded = decode_rows(encode_rows(values, table), table)
    gain = (decoded * values).sum(dim=-1) / values.square().sum(dim=-1)
    assert float(gain.mean()) == pytest.approx(1, abs=0.01)


def test_key_error_matches_the_expected_distortion():
    deviations = torch.logspace(-1.5, 0.5, 64)[torch.randperm(64)]
    keys = torch.randn(1, 1, 4000, 64) * deviations + torch.randn(64)
    layout, valid = RotaryLayout((), "none", 0, 64), torch.ones(1, 4000, dtype=torch.bool)
    table = make_key_format(keys, valid, None, [layout], Positions(), 16)
    decoded = decode_rows(encode_rows(keys, table), table)
    expected = torch.tensor(DISTORTIONS)[table.widths.long()].repeat_interleave(8, dim=-1)
    expected = expected * deviations[table.order.long()[0, 0]].square()
    assert float((decoded - keys).square().sum(dim=-1).mean()) == pytest.approx(float(expected.sum()), rel=0.05)
    even = value_table(keys, 16)
    even_error = (decode_rows(encode_rows(keys, even), even) - keys).square().sum(dim=-1).mean()
    assert float(even_error) > 3 * float(expected.sum())


def test_large_and_small_tokens_keep_their_size():
    values = torch.randn(1, 1, 400, 64)
    table = value_table(values, 32)
    for factor in (1 / 100, 1 / 10, 10.0, 100.0):
        scaled = values * factor
        error = (decode_rows(encode_rows(scaled, table), table) - scaled).square().mean() / scaled.square().mean()
        assert float(error) == pytest.approx(DISTORTIONS[4], rel=0.2)
