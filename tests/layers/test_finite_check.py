"""Tokens of items that wait for a table join the exact ones in front; what is no number is found anywhere."""

import pytest
import torch

from kvcache_plugins.layers.finite_check import check_finite


VALID = torch.tensor([[False, True, True], [True, True, True]])


def states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # The layout of models: not contiguous
    return torch.randn(2, 3, 4, 8, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "padded"])
def test_non_finite_states_are_found(dtype, number, side, valid):
    both = {"keys": states(dtype), "values": states(dtype)}
    check_finite(**both, valid=valid, layer_idx=7)
    both[side][1, 2, 1, 3] = number
    with pytest.raises(ValueError, match=f"layer 7: the {side} to be compressed hold NaN or infinity"):
        check_finite(**both, valid=valid, layer_idx=7)


def test_padding_may_be_non_finite():
    keys, values = states(), states()
    keys[0, :, 0], values[0, 1, 0] = torch.nan, torch.inf
    check_finite(keys, values, VALID, 0)
    with pytest.raises(ValueError, match="the keys"):
        check_finite(keys, values, None, 0)


def test_empty_and_meta_states_pass():
    check_finite(states()[:, :, :0], states()[..., :0], None, 0)
    check_finite(states().to("meta"), states().to("meta"), None, 0)


def test_numbers_are_named_before_scales():
    good, bad = torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3, 4), torch.nan)
    ends, reaches = torch.tensor(True), torch.tensor(False)
    check_finite(good, good, None, 0, overflow=reaches)
    with pytest.raises(ValueError, match="layer 3: tokens are too large"):
        check_finite(good, good, None, 3, overflow=ends)
    with pytest.raises(ValueError, match="layer 3: the values .* hold NaN"):
        check_finite(good, bad, None, 3, overflow=ends)
    # Scales of padding do not count: the caller masks them
    check_finite(good, bad, torch.zeros(1, 3, dtype=torch.bool), 3, overflow=reaches)
