"""Rows coded in calibrated bases by Triton's kernels against plain PyTorch, in Triton's interpreter or on a GPU."""

import os

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.allocation import allocate_widths, num_blocks
from kvcache_plugins.codecs.basis import round_basis
from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.quantizers import QUANTIZERS
from kvcache_plugins.codecs.rope import candidate_layouts
from kvcache_plugins.codecs.rows import RowCodec, RowTable, SharedTables
from kvcache_plugins.gear.kernel_check import plain_pytorch


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)
# Batch size, heads, tokens, head dim, sums of widths of keys and values
CASES = {
    "c16-d64": (1, 2, 17, 64, 18, 14),
    "one-token": (1, 1, 1, 64, 18, 14),
    "c28-d128": (1, 1, 17, 128, 56, 44),
    "d80": (2, 1, 11, 80, 30, 20),
    "odd-dim": (1, 2, 19, 20, 12, 9),
    "d256": (1, 1, 9, 256, 60, 60),
    "many": (2, 2, 129, 64, 30, 24),
}
# Rows that may differ: where a number lies at a bound to rounding, or a scale between two steps
MOST_DIFFERENT = 0.005
# Of their decoded error, relative
SAME_ERROR = 1e-3


def make_table(num_heads, head_dim, total, rope=None):
    """Random bases, whose heads differ in how steeply their energies fall, and means."""
    scales = torch.logspace(0, -1.5, head_dim)
    basis = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim))[0] * scales[:, None]
    energies = F.pad(scales.square(), (0, -head_dim % 8)).unflatten(0, (num_blocks(head_dim), 8)).sum(dim=1)
    energies = torch.stack([energies ** (1 + head) for head in range(num_heads)])
    factors = torch.rand(num_heads, head_dim) + 0.1
    own = round_basis(basis, factors)
    widths = allocate_widths(energies[None], total, QUANTIZERS["lloyd-max"].distortions)[0]
    return RowTable.in_basis(torch.randn(num_heads, head_dim).half(), factors, *own, widths, rope=rope)


def check(case, dtype=torch.float32, *, layout=0, padding=None, start=4):
    torch.manual_seed(0)
    batch_size, num_heads, length, head_dim, key_total, value_total = CASES[case]
    rates = tuple((10000.0 ** -(torch.arange(head_dim // 2) * 2 / head_dim)).tolist())
    keys = make_table(num_heads, head_dim, key_total, candidate_layouts(rates, head_dim)[layout])
    codec = RowCodec(SharedTables(keys, make_table(num_heads, head_dim, value_total)))
    positions = Positions(start, padding)
    states = torch.randn(2, batch_size, num_heads, length, head_dim).to(dtype).to(DEVICE)
    # A token of which one channel is far larger than all others
    states[:, :, :, length // 2, 5] *= 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        rows = codec.encode(*states, positions)
    with plain_pytorch():
        expected = codec.encode(*states.float(), positions)
        for number, (own, other) in enumerate(zip(rows, expected, strict=True)):
            assert own.dtype == torch.uint8 and own.shape == other.shape
            num_different = int((own != other).any(dim=-1).sum())
            assert num_different <= MOST_DIFFERENT * own[..., 0].numel() + (num_different == 1), number
            error, known = (
                (codec.decode_values(each) if number else codec.decode_keys(each, positions)) - states[number]
                for each in (own, other)
            )
            torch.testing.assert_close(error.norm(), known.norm(), rtol=SAME_ERROR, atol=1e-6)


@pytest.mark.parametrize("case", [*list(CASES)[:-1], pytest.param("many", marks=pytest.mark.long)])
def test_rows_are_those_of_pytorch(case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    check("c16-d64", dtype)


@pytest.mark.parametrize("layout", [1, -1], ids=["interleaved", "none"])
def test_layouts(layout):
    check("odd-dim", layout=layout)


def test_padding():
    check("d80", padding=torch.tensor([0, 9]), start=300)
