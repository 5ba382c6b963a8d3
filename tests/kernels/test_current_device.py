"""Launches go to the GPU of the states."""

import pytest
import torch

from kvcache_plugins.kernels import current_device


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_gpu_of_the_states_is_made_current_among_several(num_gpus, monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "device_of", entered.append)
    states = torch.zeros(1)
    context = current_device.on_device_of(states)
    if num_gpus > 1:
        assert entered == [states]
        return
    with context, context:
        # One context for all, as threads and nested launches share it
        assert not entered
