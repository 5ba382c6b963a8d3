"""How many threads compiled code runs on: as many as PyTorch is set to."""

import os
import threading

import numba
import torch


# What Numba was started with, which cannot be exceeded
_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
# Where Numba's threads are, if it has started any: not in processes that are forked from it
_PROCESS = os.getpid()


def num_threads() -> int:
    """Threads that there are for tasks."""
    return min(torch.get_num_threads(), _MAX_THREADS)


def use_threads(num_tasks: int) -> bool:
    """
    Whether there are several tasks and several threads for them; if so, Numba is set to those threads.

    Where Numba has neither OpenMP nor TBB, only the main thread's tasks are shared out: the pool of threads that Numba
    falls back to ends the process when two threads use it at once. And none are in a forked process, which GNU's
    OpenMP would end for it.
    """
    count = num_threads()
    if count == 1 or num_tasks == 1 or os.getpid() != _PROCESS:
        return False
    numba.set_num_threads(count)
    is_alone = threading.current_thread() is threading.main_thread()
    return is_alone or numba.threading_layer() != "workqueue"  # type: ignore[attr-defined]
