"""Ranks of `torch.distributed` that a command starts and gives work to: one process each, joined by gloo on CPUs.

Every rank loads the model and then does what it is told, operation by operation, so that planning and reporting stand
in one process, and measuring in the others. The ranks end with the command, however it ends.
"""

from __future__ import annotations

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
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console.inputs import load_for_evaluation
from kvcache_plugins.console.interrupts import interrupts_are_ours

from .isolated_network import INTERFACE, enter_namespace


# Of a prefill's slowest message, and of a rank that waits while another one loads
_TIMEOUT = timedelta(hours=1)
_SECONDS_TO_END = 5.0


@dataclass(slots=True)
class Worker:
    """
    What an operation finds in its rank.

    Attributes:
        rank (`int`), size (`int`): of this process among the ranks.
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): loaded in every rank.
        reference (`dict[int, torch.Tensor]`): logits of one rank alone by the prompt's length, kept for comparison.
    """

    rank: int
    size: int
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reference: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether this rank is the one that ends with the logits."""
        return self.rank == self.size - 1


class Ranks:
    """
    Ranks at work; used in a `with` statement. After an error they are of no further use: some may wait for others.

    Args:
        model (`str`): short name, folder or hub name of a model.
        size (`int`): how many ranks.
        dtype (`str`, *optional*): see `load_for_evaluation`.
        num_threads (`int`, *optional*, defaults to 1): of every rank.
        namespaces (`list[str]`, *optional*): network namespace of every rank.

    Raises:
        ValueError: if there is no rank, or the model cannot be loaded.
        ChildProcessError: if a rank fails or dies; its message names the rank.
    """

    def __init__(
        self,
        model: str,
        size: int,
        *,
        dtype: str | None = None,
        num_threads: int = 1,
        namespaces: list[str] | None = None,
    ):
        if size < 1:
            raise ValueError(f"`world_size` has to be at least 1 but got {size}")
        self.size, self.num_threads = size, num_threads
        self._setups = [
            _Setup(rank, size, model, dtype, num_threads, namespaces[rank] if namespaces else None)
            for rank in range(size)
        ]
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def __enter__(self) -> Ranks:
        is_served = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if is_served else "spawn")
        if is_served:
            # Imported once, in a process that never computes anything
            context.set_forkserver_preload([__name__, "kvcache_plugins.eval.runahead.measure"])
            with interrupts_are_ours():
                forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory(prefix="kvcache_plugins_")
        try:
            for setup in self._setups:
                pipe, other_end = context.Pipe()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=error is not None)

    def describe_machine(self, dtype: str) -> str:
        """The machine in words, for what is kept of measurements in a dtype."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.size} ranks of {threads} each, {os.cpu_count()} {platform.machine()} cores, gloo, {dtype}"

    def call(self, operation: Callable[..., Any], *args: Any) -> list[Any]:
        """
        What `operation(worker, *args)`, a function of a module, returns on every rank; all of them run it at once.

        Raises:
            ValueError: for errors that a user can cause, as a rank raised them.
            ChildProcessError: if a rank fails otherwise, or has ended.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((operation, args))
            except BrokenPipeError:
                raise ChildProcessError(self._ended(rank)) from None
        return self._answers()

    def _answers(self) -> list[Any]:
        """An answer from every rank; the first that fails is raised, as the others may wait for it."""
        answers: list[Any] = [None] * self.size
        waiting: dict[Any, int] = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting:
            for pipe in connections.wait(list(waiting)):
                rank = waiting.pop(pipe)
                try:
                    kind, answers[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise ChildProcessError(self._ended(rank)) from None
                if kind is not None:
                    raise kind(f"rank {rank}: {answers[rank]}")
        return answers

    def _ended(self, rank: int) -> str:
        self._processes[rank].join(_SECONDS_TO_END)
        return f"rank {rank} has ended without an answer, with exit code {self._processes[rank].exitcode}"

    def _end(self, *, at_once: bool) -> None:
        # Without its pipe a rank that waits for work ends by itself
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if not at_once:
                process.join(_SECONDS_TO_END)
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class _Setup:
    rank: int
    size: int
    model: str
    dtype: str | None
    num_threads: int
    namespace: str | None


def _serve(setup: _Setup, folder: str, pipe: Any) -> None:
    """A rank's life. What it answers are pairs: the type of an error and its text, or `None` and a result."""
    # The command that started it is interrupted as well, and ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if connections.wait([_parent_sentinel()], 0):
        # Interrupted before this rank was there: what it would join is gone, and it would wait without letting go
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def join(*_: Any) -> Worker:
        if setup.namespace is not None:
            # Before any thread of gloo is started: threads inherit the namespace
            enter_namespace(setup.namespace)
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        torch.set_num_threads(setup.num_threads)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=setup.rank, world_size=setup.size, timeout=_TIMEOUT)
        model, tokenizer = load_for_evaluation(setup.model, setup.dtype, "cpu")
        return Worker(setup.rank, setup.size, model, tokenizer)

    worker = _answer(pipe, join, (), hide=True)
    while worker is not None:
        try:
            operation, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        _answer(pipe, operation, (worker, *args))
    dist.destroy_process_group()


def _answer(pipe: Any, operation: Callable[..., Any], args: tuple[Any, ...], *, hide: bool = False) -> Any:
    """Does an operation and answers with its result, or with its error; `hide` answers that it was done."""
    try:
        result = operation(*args)
    except (ValueError, ImportError, OSError) as error:
        pipe.send((ValueError, str(error)))
    # Whatever it is, the command has to hear of it, or it would wait for ever
    except Exception as error:
        traceback.print_exc()
        pipe.send((ChildProcessError, f"{type(error).__name__}: {error}"))
    else:
        pipe.send((None, None if hide else result))
        return result
    return None


def _end_with_parent() -> None:
    connections.wait([_parent_sentinel()])
    os._exit(1)


def _parent_sentinel() -> int:
    """Returns the objects that become ready when the command ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    return parent.sentinel
