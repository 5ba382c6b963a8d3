"""Ranks of `torch.distributed` that a command starts and gives work to: one process each, joined by gloo on CPUs.

Every rank loads the model and runs one operation after the other, so that one process plans and reports, and the
others measure. The ranks end with the command, however it ends.
"""

import multiprocessing
import os
import platform
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection as connections
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console.inputs import load_for_evaluation
from kvcache_plugins.console.interrupts import interrupts_are_ours
from kvcache_plugins.option_checks import check_integer


# Timeout of a prefill's slowest message, and of a rank that waits while another one loads
_TIMEOUT = timedelta(hours=1)
_SECONDS_TO_END = 5.0


@dataclass(slots=True)
class Worker:
    """
    State of a rank, passed to each operation.

    Attributes:
        rank, size (`int`): number of this rank, and of all.
        model, tokenizer: the model.
        reference (`dict`): logits of a prefill by one rank alone, by the prompt's length.
    """

    rank: int
    size: int
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reference: dict[int, torch.Tensor] = field(default_factory=dict)


class Ranks:
    """
    Processes of `size` ranks, used in a `with` statement. They cannot be used after an error, as some may wait for
    others.

    Raises:
        ValueError: if there is no rank, or the model cannot be loaded.
        ChildProcessError: if a rank fails or dies; its message names the rank.
    """

    def __init__(self, model: str, size: int, *, dtype: str | None = None, num_threads: int = 1):
        check_integer("world_size", size, 1)
        self.size, self.num_threads = size, num_threads
        self._model, self._dtype = model, dtype
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def __enter__(self) -> "Ranks":
        is_served = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if is_served else "spawn")
        if is_served:
            # Import once, in a process that never computes anything
            context.set_forkserver_preload([__name__, "kvcache_plugins.eval.runahead.measure"])
            with interrupts_are_ours():
                forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory(prefix="kvcache_plugins_")
        try:
            for rank in range(self.size):
                pipe, other_end = context.Pipe()
                setup = rank, self.size, self._model, self._dtype, self.num_threads
                process = context.Process(target=_serve, args=(setup, self._folder.name, other_end), daemon=True)
                process.start()
                other_end.close()
                self._processes.append(process)
                self._pipes.append(pipe)
            self._answers()
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(at_once=kind is not None)

    def describe_machine(self, dtype: str) -> str:
        """Describe the machine, for results of measurements in a dtype."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.size} ranks of {threads} each, {os.cpu_count()} {platform.machine()} cores, gloo, {dtype}"

    def call(self, operation: Callable[..., Any], *args: Any) -> list[Any]:
        """
        Call `operation(worker, *args)`, a module's function, on all ranks at once, and return all results. Errors that
        users can cause are a `ValueError`; if a rank fails otherwise, or has ended, a `ChildProcessError`.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((operation, args))
            except BrokenPipeError:
                raise self._ended(rank) from None
        return self._answers()

    def _answers(self) -> list[Any]:
        """Wait for an answer of every rank; raise the first error at once, as other ranks may wait for that one."""
        answers: list[Any] = [None] * self.size
        waiting: dict[Any, int] = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting:
            for pipe in connections.wait(list(waiting)):
                rank = waiting.pop(pipe)
                try:
                    kind, answers[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise self._ended(rank) from None
                if kind is not None:
                    # It may have failed because another rank has ended
                    others = {each.sentinel: number for number, each in enumerate(self._processes) if number != rank}
                    ended = connections.wait(list(others), timeout=0.5) if kind is ChildProcessError else []
                    raise self._ended(others[ended[0]]) if ended else kind(f"rank {rank}: {answers[rank]}")
        return answers

    def _ended(self, rank: int) -> ChildProcessError:
        self._processes[rank].join(_SECONDS_TO_END)
        code = self._processes[rank].exitcode
        return ChildProcessError(f"rank {rank} has ended without an answer, with exit code {code}")

    def _end(self, *, at_once: bool) -> None:
        # A rank that waits for work ends when its pipe is closed
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if not at_once:
                process.join(_SECONDS_TO_END)
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(setup: tuple[int, int, str, str | None, int], folder: str, pipe: Any) -> None:
    """Serve as a rank. Answers are pairs: the type of an error and its text, or `None` and a result."""
    # An interrupt also reaches the command, which ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if connections.wait([parent.sentinel], 0):
        # The command has ended before this rank started, and other ranks with it
        return
    threading.Thread(target=_end_with_parent, args=(parent.sentinel,), daemon=True).start()
    rank, size, name, dtype, num_threads = setup

    workers: list[Worker] = []

    def join() -> None:
        torch.set_num_threads(num_threads)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        workers.append(Worker(rank, size, *load_for_evaluation(name, dtype, "cpu")))

    _answer(pipe, join, ())
    while workers:
        try:
            operation, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        _answer(pipe, operation, (*workers, *args))
    dist.destroy_process_group()


def _answer(pipe: Any, operation: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Send the result of an operation, or its error."""
    try:
        result = operation(*args)
    except (ValueError, ImportError, OSError) as error:
        pipe.send((ValueError, str(error)))
    # Without an answer the command would wait for ever
    except Exception as error:
        traceback.print_exc()
        pipe.send((ChildProcessError, f"{type(error).__name__}: {error}"))
    else:
        pipe.send((None, result))


def _end_with_parent(sentinel: int) -> None:
    connections.wait([sentinel])
    os._exit(1)
