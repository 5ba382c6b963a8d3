"""Rows coded by Triton's kernels against plain PyTorch, in Triton's interpreter or on a GPU."""

import os

import pytest
import torch

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.quantizers import thresholds
from kvcache_plugins.codecs.rope import apply_rope, candidate_layouts
from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.codecs.statistics import make_key_table, make_value_table
from kvcache_plugins.gear.kernel_check import plain_pytorch
from kvcache_plugins.kernels.triton import codebook_of


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)
# Batch size, heads, tokens, head dim, sums of widths of keys and values
CASES = {
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
}
# Rows that may differ: where a number lies at a bound to rounding, or a scale between two steps
MOST_DIFFERENT = 0.005
# Of their decoded error, relative
SAME_ERROR = 1e-3
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_layout(head_dim, name="half-split"):
    num_pairs = head_dim // 4 if name == "partial" else head_dim // 2
    rates = tuple((10000.0 ** -(torch.arange(num_pairs) / max(num_pairs, 1))).tolist())
    layouts = candidate_layouts(None if name == "none" else rates, head_dim)
    return layouts[1 if name == "interleaved" else 2 if name == "partial" else 0]


def make_codec(case, dtype=torch.float32, *, layout="half-split", start=4, padding=None, offset=1.0):
    """Random keys and values of tokens, laid out as a model lays them out, and their tables."""
    torch.manual_seed(0)
    batch_size, num_heads, length, head_dim, key_total, value_total = CASES[case]
    layout = make_layout(head_dim, layout)
    keys, values = torch.randn(2, batch_size, length, num_heads, head_dim).transpose(2, 3)
    keys = keys * torch.logspace(-1.5, 0.5, head_dim)[torch.randperm(head_dim)] + offset * torch.randn(head_dim)
    values = values * torch.randn(batch_size, num_heads, length, 1).exp()
    positions = Positions(start, padding)
    keys = apply_rope(keys, layout, positions).to(dtype)
    valid = torch.ones(batch_size, length, dtype=torch.bool)
    table = make_key_table(keys, valid, None, [layout], positions, key_total)
    codec = RowCodec((table, make_value_table(values, valid, value_total)))
    # Heads of a token one behind the other, and a token that is left out before them
    keys, values = (
        torch.cat([states[:, :, :1], states], dim=2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, 1:].to(DEVICE)
        for states in (keys, values.to(dtype))
    )
    return keys, values, codec.map(lambda tensor: tensor.to(DEVICE)), positions


def encode_both(keys, values, codec, positions):
    """Rows of both sides by the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        return codec.encode(keys, values, positions)


def check(keys, values, codec, positions):
    """Compares rows and what they decode to."""
    with plain_pytorch():
        expected = codec.encode(keys.float(), values.float(), positions)
    rows = encode_both(keys, values, codec, positions)
    for number, (own, other) in enumerate(zip(rows, expected, strict=True)):
        assert own.dtype == torch.uint8 and own.shape == other.shape
        num_different = int((own != other).any(dim=-1).sum())
        assert num_different <= MOST_DIFFERENT * own[..., 0].numel() + (num_different == 1), number
        with plain_pytorch():
            states = (keys if number == 0 else values).float()
            error, known = (
                (codec.decode_keys(each, positions) if number == 0 else codec.decode_values(each)) - states
                for each in (own, other)
            )
        torch.testing.assert_close(error.norm(), known.norm(), rtol=SAME_ERROR, atol=1e-6)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case == "many" else case for case in CASES]
)
def test_rows_are_those_of_pytorch(case):
    check(*make_codec(case))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", ["t16-d64", "d80", "t30-d256"])
def test_half_precision(case, dtype):
    check(*make_codec(case, dtype))


@pytest.mark.parametrize("layout", ["interleaved", "partial", "none"])
def test_layouts(layout):
    check(*make_codec("t16-d64", layout=layout))


@pytest.mark.parametrize("start", [0, 70_001])
def test_positions(start):
    check(*make_codec("t25-d64", start=start))


def test_padding():
    check(*make_codec("t16-d64", padding=torch.tensor([0, 7])))


def test_means_much_larger_than_deviations():
    check(*make_codec("t25-d64", offset=20.0))


def test_channels_that_do_not_vary_and_tokens_of_zeros():
    keys, values, codec, positions = make_codec("t16-d64")
    codec.tables()[0].deviation[:, :, 3] = 0
    keys[:, :, 7], values[:, :, 7] = 0, 0
    check(keys, values, codec, positions)


@pytest.mark.parametrize("factor", [1e-8, 1e6])
def test_tokens_beyond_what_scales_reach(factor):
    keys, values, codec, positions = make_codec("t16-d64")
    values[:, :, 5] *= factor
    check(keys, values, codec, positions)


def test_what_is_not_finite_stays_in_its_row():
    keys, values, codec, positions = make_codec("t16-d64")
    known = encode_both(keys, values, codec, positions)
    for states in (keys, values):
        states[0, 0, 7], states[1, 0, 8, 3], states[1, 0, 9, 3] = torch.nan, torch.inf, -torch.inf
    rows = encode_both(keys, values, codec, positions)
    for own, other in zip(rows, known, strict=True):
        own[0, 0, 7], own[1, 0, 8:10] = other[0, 0, 7], other[1, 0, 8:10]
        assert torch.equal(own, other)


def test_no_tokens():
    keys, values, codec, positions = make_codec("t16-d64")
    rows = encode_both(keys[:, :, :0], values[:, :, :0], codec, positions)
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
