"""Tasks on PyTorch's threads: every task is done, once, however many threads there are and whoever starts them."""

import gc
import sys
import threading

import pytest
import torch
from numba import njit

from kvcache_plugins.ops.compiled import threads
from kvcache_plugins.ops.compiled.arrays import longs_at
from kvcache_plugins.ops.compiled.threads import FIRST, num_tasks, run, take_task


NUM_TASKS = 2000


@njit(nogil=True)
def mark(address: int) -> None:
    """Adds one to the number of every task."""
    place = longs_at(address, (FIRST + 1,))[FIRST]
    task, count = take_task(address), num_tasks(address)
    while task < count:
        longs_at(place, (count,))[task] += 1
        task = take_task(address)


@pytest.fixture(params=[1, 2, 5])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["openmp", "python"])
def pool(request, monkeypatch):
    """What PyTorch has, and what takes its place on other systems."""
    if request.param == "python":
        monkeypatch.setattr(threads, "_start_threads", lambda: threads._run_on_python_threads)
    return request.param


def marks_of(count: int) -> torch.Tensor:
    marks = torch.zeros(count, dtype=torch.int64)
    run(mark, count, [marks.data_ptr()])
    return marks


@pytest.mark.parametrize("count", [1, 2, NUM_TASKS])
def test_every_task_is_done_once(count, num_threads, pool):
    # After work of PyTorch's own, whose threads may still be awake
    torch.randn(300, 300) @ torch.randn(300, 300)
    assert marks_of(count).eq(1).all()


def test_several_callers_at_once(num_threads, pool):
    results = []
    callers = [threading.Thread(target=lambda: results.append(marks_of(NUM_TASKS))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4 and all(marks.eq(1).all() for marks in results)


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of that kind is Linux's")
def test_threads_are_pytorchs():
    assert threads._start_threads() is not threads._run_on_python_threads


class Worker:
    """What looks at the collector while it is compiled, and cannot be."""

    was_collected = True

    def get_compile_result(self, signature):
        self.was_collected = gc.isenabled()
        raise TypeError("not to be compiled")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_nothing_is_collected_while_a_worker_is_compiled(is_enabled):
    worker = Worker()
    if not is_enabled:
        gc.disable()
    try:
        with pytest.raises(TypeError, match="not to be compiled"):
            threads.entry_of(worker)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
    assert not worker.was_collected
