"""Compiled coding of tokens: the bytes of plain PyTorch."""

import pytest
import torch

from kvcache_plugins.ops.transform_coding import trellis
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout
from kvcache_plugins.ops.transform_coding.rows import RowTable
from kvcache_plugins.ops.transform_coding.statistics import Angles, key_table_of_layout, make_value_table


pytest.importorskip("numba")
HEAD_DIMS = (1, 20, 33, 64, 128, 300)


def tables(states: torch.Tensor, total: int, quantizer: str) -> dict[str, RowTable]:
    layout = RotaryLayout((), "none", 0, states.shape[3])
    valid = torch.ones(states.shape[0], states.shape[2], dtype=torch.bool)
    angles = Angles.at(layout, 0, states.shape[2], None, states.device)
    keys, _ = key_table_of_layout(states, valid, None, 0, layout, angles, total, quantizer)
    return {"keys": keys, "values": make_value_table(states, valid, total, quantizer)}


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("quantizer", "bits"), [("lloyd-max", (1.5, 4, 8)), ("trellis", (1.5, 3))], ids=str)
def test_bytes_are_those_of_pytorch(monkeypatch, side, head_dim, quantizer, bits):
    # In PyTorch a search takes its time
    num_tokens = 301 if quantizer == "lloyd-max" else 61
    states = torch.randn(2, 2, num_tokens, head_dim) * torch.rand(head_dim) * 5 + torch.randn(head_dim)
    states[:, :, 5] = 0
    states[:, :, 6] *= 1000
    for nbits in bits:
        table = tables(states, max(int(nbits * -(-head_dim // 8)), 3), quantizer)[side]
        rows = {}
        for kernel in ("torch", "compiled"):
            monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
            rows[kernel] = table.encode(states)
        # Sums are rounded in another order, which may turn a code or a scale over where two are equally near
        assert float((rows["compiled"] != rows["torch"]).float().mean()) < 1e-3
        torch.testing.assert_close(*map(table.decode, rows.values()), rtol=0, atol=0.06 * float(states.abs().max()))


@pytest.mark.parametrize(("width", "known"), [(2, 1.26), (3, 1.39), (4, 1.58)])
def test_rows_of_64_are_within_five_percent_of_endless_trellises(monkeypatch, width, known):
    """Mean squared error over the Gaussian bound, beginnings, scales of a byte and all."""
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")
    torch.manual_seed(0)
    states = torch.randn(1, 1, 10000, 64)
    widths = torch.full((1, 1, 8), width, dtype=torch.uint8)
    table = RowTable(None, None, torch.ones(1, 1, 1).half(), widths, 1 + 8 * width, 64, True, quantizer="trellis")
    error = (table.decode(table.encode(states)) - states).square().mean()
    assert float(error) * 4**width < 1.05 * known
    assert float(error) == pytest.approx(trellis.DISTORTIONS[width], rel=0.02)
