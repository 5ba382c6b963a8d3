"""Launches that are kept: each has the arguments of its own call, and no tensor of an earlier one is kept alive."""

import weakref

import torch
from kernel_cases import DEVICE, needs_triton

from kvcache_plugins.triton_kernels.infinigen.push import prepare_exact_push
from kvcache_plugins.triton_kernels.launch import KeptLaunch


pytestmark = needs_triton
CHANGING = ["new_keys_ptr", "new_values_ptr"]


def make_states(*shape):
    return torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE)


def test_changing_arguments_are_not_kept_alive():
    new = make_states(1, 2, 1, 8)
    kept = KeptLaunch(prepare_exact_push(new, make_states(1, 2, 4, 8)), CHANGING)
    before = [weakref.ref(each) for each in new]
    del new
    assert all(each() is None for each in before)
    kept(*make_states(1, 2, 1, 8))


def test_a_launch_in_another_thread_changes_no_arguments():
    tail = make_states(1, 2, 4, 8)
    kept, launched = KeptLaunch(prepare_exact_push(make_states(1, 2, 1, 8), tail), CHANGING), []
    # As for a compiled kernel; the interpreter has none
    kept._run = lambda *values: launched.append(values[:2])

    class Interrupted(torch.Tensor):
        """A tensor whose address is asked for right when another thread launches."""

        def data_ptr(self):
            kept(*others)
            return super().data_ptr()

    own, others = make_states(1, 2, 1, 8), make_states(1, 2, 1, 8)
    kept(own[0], own[1].as_subclass(Interrupted))
    assert launched == [tuple(each.data_ptr() for each in pair) for pair in (others, own)]
