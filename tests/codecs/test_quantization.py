"""Packing is exact; quantization stays within half a step of every value, in every grouping."""

import pytest
import torch

from kvcache_plugins.codecs.quantization import (
    SUPPORTED_NBITS,
    Grouping,
    are_in_range,
    check_range,
    dequantize,
    expand_groups,
    pack,
    packed_size,
    quantize,
    unpack,
)


GROUPINGS = {
    "kcvt-keys": Grouping("channel", None),
    "kivi-keys": Grouping("channel", 8),
    "per-token": Grouping("token", 4),
    "kcvt-values": Grouping("token", None),
}


@pytest.mark.parametrize("nbits", SUPPORTED_NBITS)
@pytest.mark.parametrize("head_dim", [1, 7, 16, 63, 64, 80, 96, 128, 256])
def test_packing_is_exact(nbits, head_dim):
    codes = torch.randint(0, 2**nbits, (2, 3, 5, head_dim), dtype=torch.uint8)
    packed = pack(codes, nbits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, 5, packed_size(head_dim, nbits))
    assert torch.equal(unpack(packed, nbits, head_dim), codes)
    assert head_dim % 8 or packed_size(head_dim, nbits) == head_dim * nbits // 8


@pytest.mark.parametrize("nbits", SUPPORTED_NBITS)
@pytest.mark.parametrize("name", GROUPINGS)
def test_error_is_at_most_half_a_step(nbits, name):
    grouping = GROUPINGS[name]
    states = torch.randn(2, 3, 2, 24, 16) * 3 + 1
    codes, scale, zero = quantize(states, None, nbits, grouping)
    assert scale.dtype == zero.dtype == torch.float16
    step = expand_groups(scale, grouping, states.shape).float()
    error = (dequantize(codes, scale, zero, grouping) - states).abs()
    # Scale and zero are rounded to float16, which moves the ends of the range a little
    assert (error <= 0.5 * step + 2e-3 * states.abs().amax()).all()
    assert codes.max() == 2**nbits - 1
    assert codes.min() == 0


@pytest.mark.parametrize("bad", [1e6, -1e6, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", GROUPINGS)
def test_states_beyond_float16_are_told(name, masked, bad):
    states = torch.randn(1, 2, 1, 8, 4)
    keep = (torch.arange(8) > 1)[:, None].expand(1, 2, 1, 8, 4) if masked else None
    _, *fitting = quantize(states, keep, 4, GROUPINGS[name])
    check_range(are_in_range(*fitting))
    states[0, 1, 0, 5, 2] = bad
    _, *exceeding = quantize(states, keep, 4, GROUPINGS[name])
    with pytest.raises(ValueError, match="range of float16"):
        check_range(are_in_range(*fitting), are_in_range(*exceeding))


@pytest.mark.parametrize("nbits", SUPPORTED_NBITS)
def test_constants_are_right_on_average(nbits):
    """Spreads errors: all tokens would be rounded to the same side, which no average over them mends."""
    constant = torch.randn(2, 2, 1, 1, 64)
    states = constant.expand(-1, -1, 3, 200, -1)
    grouping = Grouping("token", 64)
    codes, scale, zero = quantize(states, None, nbits, grouping, spread_errors=True)
    errors = dequantize(codes, scale, zero, grouping) - states
    # Scales and zeros are of float16
    step, rounding = scale.float().amax(), 1e-3 * constant.abs().max()
    assert errors.abs().max() <= step + rounding
    assert errors.mean(dim=3).abs().max() <= 0.02 * step + rounding
    # Weights that fall with the distance, as attention's do
    weights = torch.linspace(0, 1, 200)[:, None]
    assert ((errors * weights).sum(dim=3) / weights.sum()).abs().max() <= 0.03 * step + rounding


def test_states_that_differ_are_rounded_to_the_nearest():
    states, grouping = torch.randn(2, 3, 2, 100, 32), Grouping("token", 32)
    nearest = quantize(states, None, 3, grouping)
    assert all(map(torch.equal, quantize(states, None, 3, grouping, spread_errors=True), nearest))
    # Of two heads one is constant
    states[:, 1] = states[:, 1, :1, :1]
    codes, nearest = (quantize(states, None, 3, grouping, spread_errors=each)[0] for each in (True, False))
    assert torch.equal(codes[:, ::2], nearest[:, ::2]) and not torch.equal(codes[:, 1], nearest[:, 1])


def test_padding_changes_nothing_of_constants():
    alone, grouping = torch.randn(1, 2, 1, 1, 32).repeat(1, 1, 1, 60, 1), Grouping("token", 32)
    padded = torch.cat([1e3 * torch.randn(1, 2, 1, 20, 32), alone], dim=3)
    keep = (torch.arange(80) >= 20)[None, None, None, :, None]
    codes = quantize(torch.where(keep, padded, 0), keep, 3, grouping, spread_errors=True)[0]
    assert torch.equal(codes[:, :, :, 20:], quantize(alone, None, 3, grouping, spread_errors=True)[0])
