"""The compression kernels agree with the plain functions of `kvcache_plugins.ops`.

Without a GPU they run on the CPU in Triton's interpreter, which has to be asked for before Triton is imported. Where
it was not, this file is run once more in a process that asks for it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_plugins.ops import low_rank, outlier_selection
from kvcache_plugins.ops.quantization import SUPPORTED_NBITS, Grouping, pack, quantize, unpack
from kvcache_plugins.triton_kernels.compression.low_rank import power_iteration
from kvcache_plugins.triton_kernels.compression.outliers import select_outliers
from kvcache_plugins.triton_kernels.compression.quantization import quantize_and_pack
from kvcache_plugins.triton_kernels.compression.quantize_channels import MAX_TOKENS_IN_PROGRAM


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in a process of its own")
# Chunk length, head dim, group size by channel, group size by token
SIZES = [(100, 20, 50, 5), (64, 80, 32, 20), (100, 64, 25, 16), (20, 128, 10, 32)]
# Of the product `a b^T`, relative to its norm; three TF32 terms keep about 20 bits.
PRODUCT_TOLERANCE = 1e-4


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="kernels run right here")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    # Not in the project's root, where `triton_kernels` could be found under the wrong name
    folder = Path(__file__).parent
    outcome = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stdout[-5000:]
    assert " passed" in outcome.stdout


def make_states(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(*shape, generator=generator)
    return (states * (1 + 3 * torch.rand(shape[-1], generator=generator)) + 0.5).to(DEVICE)


def make_keep(states: torch.Tensor) -> torch.Tensor:
    """Outliers left out everywhere, and in the first chunk of the first head the first half of the tokens."""
    keep = torch.rand(states.shape, generator=torch.Generator().manual_seed(1)).to(states.device) > 0.05
    keep[:, 0, 0, : states.shape[3] // 2] = False
    return keep


def check_quantization(states, keep, nbits, axis, group_size) -> None:
    codes, scale, zero = quantize_and_pack(states, keep, nbits, axis, group_size)
    expected, expected_scale, expected_zero = quantize(states.float(), keep, nbits, Grouping(axis, group_size))
    assert codes.dtype == torch.uint8
    assert scale.dtype == zero.dtype == torch.float16
    assert torch.equal(zero, expected_zero)
    if DEVICE == "cpu":
        assert torch.equal(scale, expected_scale)
        assert torch.equal(codes, pack(expected, nbits))
        return
    # On a GPU PyTorch divides by a number by multiplying with its inverse, and scales may differ in their last bit
    torch.testing.assert_close(scale, expected_scale, rtol=1e-3, atol=0)
    difference = (unpack(codes, nbits, states.shape[-1]).int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3


@runs_kernels
@pytest.mark.parametrize("grouping", ["channel", "channel groups", "token", "token groups"])
@pytest.mark.parametrize("nbits", SUPPORTED_NBITS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def test_quantization(sizes, nbits, grouping):
    length, head_dim, by_channel, by_token = sizes
    axis = grouping.split()[0]
    group_size = (by_channel if axis == "channel" else by_token) if "groups" in grouping else None
    states = make_states(1, 2, 1, length, head_dim)
    keep = make_keep(states) if nbits < 8 else None
    check_quantization(states, keep, nbits, axis, group_size)


@runs_kernels
@pytest.mark.parametrize("nbits", [2, 3])
@pytest.mark.parametrize(("length", "group_size"), [(MAX_TOKENS_IN_PROGRAM + 70, None), (300, 150)])
def test_groups_longer_than_a_program(length, group_size, nbits):
    states = make_states(1, 2, 1, length, 20)
    check_quantization(states, make_keep(states), nbits, "channel", group_size)


@runs_kernels
@pytest.mark.parametrize("head_dim", [96, 256])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_wide_heads(head_dim, axis):
    check_quantization(make_states(1, 1, 1, 8, head_dim), None, 3, axis, None)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_any_strides_and_types(axis, dtype):
    """Chunks cut out of `[B, T, H, D]` projections, and a mask of tokens in place of one of values."""
    projection = make_states(2, 3 * 12 + 5, 2, 20).to(dtype)
    states = projection[:, 5:].transpose(1, 2).unflatten(2, (3, 12))
    assert not states.is_contiguous()
    keep = torch.rand(2, 1, 3, 12, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE) > 0.2
    check_quantization(states, keep, 2, axis, None)


@runs_kernels
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_constant_groups_have_code_zero(axis):
    codes, scale, zero = quantize_and_pack(torch.full((1, 2, 1, 8, 8), 0.3, device=DEVICE).half(), None, 2, axis, None)
    assert not codes.any()
    assert not scale.any()
    assert (zero == torch.tensor(0.3).half()).all()


@runs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e6])
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("length", [8, MAX_TOKENS_IN_PROGRAM + 1])
def test_what_does_not_fit_float16_shows(length, axis, bad):
    states = make_states(1, 1, 1, length, 4)
    states[0, 0, 0, 3, 1] = bad
    _, scale, zero = quantize_and_pack(states, None, 4, axis, None)
    is_finite = (scale.isfinite() & zero.isfinite()).flatten()
    # The group of channel 1, or of token 3
    assert (~is_finite).nonzero().flatten().tolist() == [1 if axis == "channel" else 3]
    _, scale, zero = quantize_and_pack(states, states.isfinite() & (states < 1e5), 4, axis, None)
    assert (scale.isfinite() & zero.isfinite()).all()


@runs_kernels
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(SUPPORTED_NBITS), st.integers(1, 70), st.integers(1, 9), st.integers(0, 99))
def test_packed_codes_unpack_to_what_they_were(nbits, head_dim, length, seed):
    """States that are codes, with a step of 1: all of packing, and none of the rounding."""
    codes = torch.randint(0, 2**nbits, (1, 2, 1, length, head_dim), generator=torch.Generator().manual_seed(seed))
    codes[:, 0, :, :, 0] = 0
    codes[:, 1, :, :, 0] = 2**nbits - 1
    packed, scale, zero = quantize_and_pack(codes.float().to(DEVICE), None, nbits, "token", None)
    assert (scale == 1).all()
    assert (zero == 0).all()
    assert torch.equal(packed.cpu(), pack(codes.to(torch.uint8), nbits))
    assert torch.equal(unpack(packed, nbits, head_dim).cpu(), codes.to(torch.uint8))


def make_start(head_dim: int, rank: int) -> torch.Tensor:
    """What `ops.low_rank.power_iteration` begins with."""
    return torch.randn(head_dim, rank, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def relative_error(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    product, expected_product = (a @ b.transpose(-1, -2) for a, b in (actual, expected))
    return float((product - expected_product).norm() / expected_product.norm())


@runs_kernels
@pytest.mark.parametrize("rank", [1, 4, 8])
@pytest.mark.parametrize(("length", "head_dim"), [(20, 20), (64, 80), (100, 64), (128, 128), (33, 256)])
def test_power_iteration(length, head_dim, rank):
    residual = make_states(1, 1, 2, length, head_dim)
    residual[:, :, 1, : length // 2] = 0
    a, b = power_iteration(residual, rank, 3, make_start(head_dim, rank))
    assert relative_error((a, b), low_rank.power_iteration(residual, rank, 3)) < PRODUCT_TOLERANCE
    identity = torch.eye(rank, device=DEVICE).expand(1, 1, 2, rank, rank)
    torch.testing.assert_close(a.transpose(-1, -2) @ a, identity, rtol=0, atol=1e-5)
    assert not a[:, :, 1, : length // 2].any()


@runs_kernels
@pytest.mark.parametrize("num_iterations", [1, 2, 5])
def test_power_iteration_of_any_strides(num_iterations):
    residual = make_states(2, 24, 3, 20).transpose(1, 2).half()
    actual = power_iteration(residual, 3, num_iterations, make_start(20, 3))
    assert relative_error(actual, low_rank.power_iteration(residual.float(), 3, num_iterations)) < PRODUCT_TOLERANCE


@runs_kernels
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_power_iteration_finds_a_matrix_of_low_rank(scale):
    residual = scale * make_states(40, 2) @ make_states(2, 32, seed=1)
    a, b = power_iteration(residual, 4, 3, make_start(32, 4))
    torch.testing.assert_close(a @ b.T, residual, rtol=0, atol=float(1e-5 * residual.abs().max()))


@runs_kernels
def test_power_iteration_leaves_dependent_columns_zero():
    # Of rank 1, with values that a tensor core's products do not round
    residual = make_states(40, 1).sub(0.5).sign() @ make_states(1, 32, seed=1).sub(0.5).sign()
    a, b = power_iteration(residual, 3, 3, make_start(32, 3))
    assert not a[:, 1:].any()
    assert not b[:, 1:].any()
    torch.testing.assert_close(a @ b.T, residual, rtol=0, atol=1e-5)


@runs_kernels
def test_power_iteration_of_zeros_is_zero():
    a, b = power_iteration(torch.zeros(1, 20, 16, device=DEVICE), 2, 3, make_start(16, 2))
    assert not a.any()
    assert not b.any()


def check_selection(rows, valid, counts, num_per_side) -> None:
    """The same values as the reference's, slot by slot where slots count, and no such place twice in a row."""
    indices = select_outliers(rows, num_per_side, valid, counts)
    reference_counts = torch.tensor(num_per_side) if counts is None else counts[..., None]
    expected, in_use = outlier_selection._extremes(rows.float(), valid, reference_counts.to(rows.device), num_per_side)
    in_use = in_use.expand(indices.shape)
    assert indices.dtype == torch.int64
    assert indices.min() >= 0
    assert indices.max() < rows.shape[-1]
    selected, expected_values = rows.gather(-1, indices)[in_use], rows.gather(-1, expected)[in_use]
    torch.testing.assert_close(selected, expected_values, rtol=0, atol=0, equal_nan=True)
    for row, row_in_use in zip(indices.flatten(0, -2), in_use.flatten(0, -2), strict=True):
        used = row[row_in_use].tolist()
        assert len(used) == len(set(used))


@runs_kernels
@pytest.mark.parametrize("values", ["normal", "ties", "bfloat16"])
@pytest.mark.parametrize(("row_length", "num_per_side"), [(20, 1), (64, 3), (100, 50), (640, 6), (1024, 10)])
def test_selection(row_length, num_per_side, values):
    rows = make_states(9, row_length)
    rows = rows.round() if values == "ties" else rows.bfloat16() if values == "bfloat16" else rows
    check_selection(rows, None, None, num_per_side)


@runs_kernels
def test_selection_with_infinities_and_nan():
    rows = make_states(4, 30)
    rows[0, 5] = float("inf")
    rows[1, 6:9] = float("-inf")
    rows[2, 7] = float("nan")
    # With the sign bit set
    rows[2, 9] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    rows[3, ::2], rows[3, 1::2] = 0.0, -0.0
    check_selection(rows, None, None, 4)


@runs_kernels
def test_selection_among_heads_that_lie_beyond_32_bits():
    """As the values of 541 thousand tokens do at 32 heads. Only what is written of the storage takes memory."""
    rows = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE).as_strided((2, 3, 4), (8, 2**30, 1))
    rows.copy_(make_states(2, 3, 4))
    assert torch.equal(select_outliers(rows, 3, row_dims=2), select_outliers(rows.contiguous(), 3, row_dims=2))


@runs_kernels
def test_selection_among_valid_keys():
    """Keys as they lie, `[B, H, M, L, D]`, and items with fewer tokens, which keep fewer."""
    keys = make_states(3, 2, 2, 50, 20)
    # Of 6 valid ones the slots that do not count would take all, and leave none for the smallest
    num_valid = torch.tensor([[50, 41], [17, 6], [2, 0]])
    valid = torch.arange(50) < num_valid[..., None]
    counts = torch.tensor(
        [[outlier_selection.num_outliers_per_side(n, 0.4) for n in row] for row in num_valid.tolist()]
    )
    assert counts.unique().numel() > 3
    rows = keys.transpose(3, 4)
    rows_valid = valid[:, None, :, None, :].to(DEVICE)
    check_selection(rows, rows_valid, counts[:, None, :, None].to(DEVICE), int(counts.max()))
