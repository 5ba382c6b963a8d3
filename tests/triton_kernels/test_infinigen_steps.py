"""Steps of InfiniGen by Triton's kernels: few launches, the same every time, and nothing is read from the device.

Under a stand-in for a GPU's driver all operations of PyTorch that are the cache's own count as launches too, but for
views and allocations. That runs in a process of its own, as Triton decides when it is imported if it interprets.
"""

import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


# Launches of a step, of each layer
MOST_LAUNCHES = 12
SPECULATED = ["rms_norm_kernel", "rotate_kernel"]
CHOSEN = ["choose_kernel", "_move_rows_kernel", "push_exact_kernel"]
ATTENDED = ["attend_chosen_kernel", "merge_kernel"]
# Launches of a layer beside the query projection, and whether sequences are padded
CASES = {
    "infinigen": ["_scores_kernel", *CHOSEN, *ATTENDED],
    "infinigen-padded": ["_scores_kernel", *CHOSEN, *ATTENDED],
    # Queries have a norm of their own, which the kernel that rotates them computes
    "infinigen-query-norm": ["_scores_kernel", *CHOSEN, *ATTENDED],
    "infinigen-paper": ["score_columns_kernel", "count_kernel", *CHOSEN, *ATTENDED],
    "infinigen-transform": ["attend_kernel", *CHOSEN, "decode_rows_kernel", *ATTENDED],
}
NUM_PROMPT, NUM_STEPS, NUM_LAYERS = 200, 40, 3
ALLOCATIONS = ("empty", "new_empty", "zeros", "new_zeros", "zero_", "_unsafe_view", "lift_fresh")
READING = {"_local_scalar_dense", "item", "nonzero", "equal", "_to_cpu"}


class OwnOperations(TorchDispatchMode):
    """Operations of PyTorch that the package causes and a GPU would run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and not name.startswith(ALLOCATIONS) and is_own(sys._getframe(1)):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def is_own(frame):
    while frame is not None and "kvcache_plugins" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


class Event:
    def synchronize(self):
        raise AssertionError("the host waits for the device")


class Stream:
    def __init__(self, device=None):
        pass

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self, event=None):
        return event or Event()


def use_gpu_pools(stack):
    """Have pools take a GPU's ways: streams that do nothing, and ordinary memory for page-locked one."""
    from kvcache_plugins.infinigen import pool

    zeros, stream = torch.zeros, Stream()
    for owner, name, value in [
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "stream", lambda own: nullcontext()),
        (torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options)),
        (torch.Tensor, "record_stream", lambda tensor, own: None),
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
        (pool, "is_gpu", lambda device: True),
    ]:
        stack.enter_context(patch.object(owner, name, value))


@torch.no_grad()
def check(name):
    """Decode tokens, and write what a step of a layer launches."""
    import stand_in

    from kvcache_plugins import InfiniGenCache, InfiniGenTransformCache
    from kvcache_plugins.infinigen.hooks import hooks_of

    family = "qwen3" if name == "infinigen-query-norm" else "llama"
    model = stand_in.make_model(64, NUM_LAYERS, torch.bfloat16, family=family)
    is_padded = name == "infinigen-padded"
    options = {"alpha": 4.0, "partial_ratio": 0.3} if name == "infinigen-paper" else {}
    make_cache = InfiniGenTransformCache if name == "infinigen-transform" else InfiniGenCache
    cache = make_cache(model, speculate=True, full_layers=(), **options)
    # Kernels that do not run make other queries than attention gets
    hooks_of(model).checked.update(range(NUM_LAYERS))
    ids = torch.randint(32, (1 + is_padded, NUM_PROMPT))
    mask = torch.ones_like(ids)
    mask[0, : 7 * is_padded] = 0
    steps, compiled = [], []
    with ExitStack() as stack:
        driver = stack.enter_context(stand_in.stand_in_driver())
        use_gpu_pools(stack)
        for number in range(1 + NUM_STEPS):
            if number:
                ids = ids[:, :1]
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            driver.launches.clear()
            with OwnOperations() as mode:
                model(ids, past_key_values=cache, attention_mask=mask, position_ids=places)
            steps.append((Counter(driver.launches), Counter(mode.names)))
            compiled.append(len(driver.compilations))
        layers = cache.layers
        # Kept, as events of the stand-in cannot be waited for
        for layer in layers:
            layer.pool._events.clear()
    assert all(layer.pool.num_slots == NUM_PROMPT for layer in layers), "a run of tokens moves into the pool"
    expected = Counter(NUM_LAYERS * CASES[name]) + Counter((NUM_LAYERS - 1) * SPECULATED)
    num_moving, num_growing = 0, 0
    for number, (launches, operations) in enumerate(steps[2:], start=2):
        if launches["push_exact_kernel"] < NUM_LAYERS:
            # Tokens move into the pool, and the newest is appended to the tail by PyTorch
            num_moving += 1
            continue
        assert not READING & operations.keys(), operations
        assert number == 2 or compiled[number] == compiled[number - 1], compiled
        assert launches == expected, (number, launches)
        # Now and then the tail grows
        num_growing += operations.pop("copy_", 0) > 0
        assert operations == {"mm": NUM_LAYERS - 1}, (number, operations)
        assert launches.total() + operations.total() <= MOST_LAUNCHES * NUM_LAYERS
    assert num_moving == 1 and num_growing <= 2
    sys.stdout.write(f"{name}: {len(CASES[name]) + len(SPECULATED) + 1} launches a layer\n")


@pytest.mark.slow
def test_a_step_is_few_launches(run_compiling):
    """One process for all cases: importing takes it longer than they do."""
    assert run_compiling(*CASES).count("launches a layer") == len(CASES)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        check(case)
