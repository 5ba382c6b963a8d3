"""Masks of replayed steps are compared with the padding where they are; what that does to steps is tested in
`test_captured_steps.py`."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_plugins.gear.step_masks import StepMasks


class Names(TorchDispatchMode):
    """Of operations, among them those that the host waits for."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def masks_of(padding):
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :padding] = 0
    return StepMasks(torch.tensor([padding, 0]) if padding else None), mask


@pytest.mark.parametrize("padding", [0, 5])
def test_nothing_is_read_until_it_is_asked_for(padding):
    masks, mask = masks_of(padding)
    with Names() as mode:
        for _ in range(3):
            masks.add(mask)
    assert mode.names and not mode.names & {"_local_scalar_dense", "item", "is_nonzero", "equal"}
    with Names() as mode:
        masks.check()
    assert "_local_scalar_dense" in mode.names
    with Names() as mode:
        masks.check()
    assert not mode.names


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("place", [0, 5, 29])
def test_one_that_is_wrong_is_remembered(place, padding, dtype):
    masks, mask = masks_of(padding)
    wrong = mask.clone()
    wrong[0, place] = 1 - wrong[0, place]
    assert masks.fits(mask.to(dtype)) and not masks.fits(wrong.to(dtype))
    for each in (mask, wrong, mask):
        masks.add(each.to(dtype))
    with pytest.raises(ValueError, match="only grow by ones"):
        masks.check()
    masks.check()
