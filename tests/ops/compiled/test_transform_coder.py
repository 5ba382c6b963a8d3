"""Compiled coding of tokens: the bytes of plain PyTorch."""

import pytest
import torch

from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout
from kvcache_plugins.ops.transform_coding.rows import RowTable
from kvcache_plugins.ops.transform_coding.statistics import Angles, key_table_of_layout, make_value_table


pytest.importorskip("numba")
HEAD_DIMS = (1, 20, 33, 64, 128, 300)


def tables(states: torch.Tensor, total: int) -> dict[str, RowTable]:
    layout = RotaryLayout((), "none", 0, states.shape[3])
    valid = torch.ones(states.shape[0], states.shape[2], dtype=torch.bool)
    angles = Angles.at(layout, 0, states.shape[2], None, states.device)
    keys, _ = key_table_of_layout(states, valid, None, 0, layout, angles, total)
    return {"keys": keys, "values": make_value_table(states, valid, total)}


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_are_those_of_pytorch(monkeypatch, side, head_dim):
    states = torch.randn(2, 2, 301, head_dim) * torch.rand(head_dim) * 5 + torch.randn(head_dim)
    states[:, :, 5] = 0
    states[:, :, 6] *= 1000
    for nbits in (1.5, 4, 8):
        table = tables(states, max(int(nbits * -(-head_dim // 8)), 3))[side]
        rows = {}
        for kernel in ("torch", "compiled"):
            monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
            rows[kernel] = table.encode(states)
        # Sums are rounded in another order, which may turn a code or a scale over where two are equally near
        assert float((rows["compiled"] != rows["torch"]).float().mean()) < 1e-3
        torch.testing.assert_close(*map(table.decode, rows.values()), rtol=0, atol=0.06 * float(states.abs().max()))
