"""Processes that are forked or spawned after PyTorch's threads were used, by PyTorch and by compiled attention.

A forked process has none of its parent's threads. PyTorch's own operations wait for theirs for ever unless it is set
to one thread, as its data loaders do; compiled attention does without.
"""

import multiprocessing
import os
from pathlib import Path

import pytest


SECONDS = 300


def sums_of_logits() -> list[float]:
    """Sums the logits of three caches after a prompt of four rows, one thread or several."""
    import torch

    from kvcache_plugins import create_cache
    from kvcache_plugins.contract import tiny_models

    model, sums = tiny_models()["llama"], []
    ids = torch.randint(1, 200, (4, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        options = {
            "gear-2bit": {"residual_length": 16},
            "transform-22": {},
            "infinigen-transform": {"full_layers": ()},
        }
        for name, own in options.items():
            cache = create_cache(name, model, **own)
            for chunk in ids.split([80, *[1] * 20], dim=1):
                logits = model(chunk, past_key_values=cache).logits
            sums.append(logits.double().sum().item())
    return sums


def use_threads_then_fork() -> None:
    """Run by a process of its own, with two threads."""
    import torch

    from kvcache_plugins.kernels.library import num_threads

    torch.set_num_threads(2)
    expected = sums_of_logits()
    assert num_threads() == 2
    process = multiprocessing.get_context("fork").Process(target=check_in_fork, args=(expected,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0, process.exitcode


def check_in_fork(expected: list[float]) -> None:
    import torch

    from kvcache_plugins.kernels.library import num_threads

    assert torch.get_num_threads() == 2 and num_threads() == 1
    torch.set_num_threads(1)
    torch.testing.assert_close(sums_of_logits(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_continues_with_the_same_tokens(run_python) -> None:
    code = "import test_processes; test_processes.use_threads_then_fork()"
    run_python("-c", code, cwd=Path(__file__).parent, timeout=2 * SECONDS, OMP_NUM_THREADS=2, HF_HUB_OFFLINE=1)
