"""Communication of a rank with its two neighbours, and reports of failures.

A rank waits only for the one before it. Receives are posted some layers ahead; tensors are held until they are
sent. The one collective of a prefill comes before any layer: all ranks compare their arguments.

A rank that fails writes the reason into the store of the process group, and ranks after it in the chain read it. Every
communication goes through `guarded`, so that every way to fail is one kind of error.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


# More receives would only hold memory for prefixes that the rank before has not computed yet
RECEIVES_AHEAD = 3
Result = TypeVar("Result")


class RunaheadError(RuntimeError):
    """A rank of the chain, named in the message, has failed or does not answer."""


class FailureReports:
    """Failures of all ranks in the prefill number `run`: reports of other prefills are not read."""

    def __init__(self, rank: int, run: int) -> None:
        self._rank = rank
        self._key = f"kvcache_plugins/runahead/{run}"

    def guarded(self, operation: Callable[[], Result], other: str, when: str) -> Result:
        """Return the result of a communication; its failure is a `RunaheadError` that names both ranks and `when`."""
        try:
            result = operation()
        except (RuntimeError, ValueError) as error:
            reason = ""
            with suppress(Exception):
                if _store().check([self._key]):
                    reason = f" The first failure reported: {_store().get(self._key).decode()}."
            failure = RunaheadError(
                f"rank {self._rank}: {other} did not answer {when}; it has ended or hangs.{reason}"
            )
            self.add(failure)
            raise failure from error
        if result is False:
            raise RunaheadError(f"rank {self._rank}: {other} timed out {when}")
        return result

    def add(self, error: BaseException) -> None:
        """Report a failure, if it is the first and the group's store still exists."""
        with suppress(Exception):
            message = f"rank {self._rank} (process {os.getpid()}): {type(error).__name__}: {error}"
            _store().compare_set(self._key, "", message)


def _store() -> Store:
    # PyTorch has no public name for the store of the process group
    return dist.distributed_c10d._get_default_store()


def digest(*tensors: torch.Tensor | None) -> str:
    """Describe integer tensors by their shapes and a digest of their values."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(b"-" if tensor is None else tensor.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
    shapes = ", ".join("none" if tensor is None else "x".join(map(str, tensor.shape)) for tensor in tensors)
    return f"{shapes}: {sha.hexdigest()[:16]}"


def agree(call: Mapping[str, object], group: dist.ProcessGroup | None, failures: FailureReports) -> None:
    """
    Compare the arguments of all ranks by name; a rank that differs, or has an `"error"`, is a `ValueError` on every
    rank.
    """
    calls: list[Mapping[str, object]] = [{}] * dist.get_world_size(group)
    failures.guarded(lambda: dist.all_gather_object(calls, call, group=group), "another rank", "before layer 0")
    for rank, each in enumerate(calls):
        if "error" in each:
            raise ValueError(f"rank {rank}: {each['error']}")
    for rank, each in enumerate(calls):
        for name, expected in calls[0].items():
            if each[name] != expected:
                raise ValueError(
                    f"rank {rank}: `{name}` has to be the same on all ranks, but is {each[name]} there and {expected} "
                    "on rank 0"
                )


class Transfer(Protocol):
    """A send or receive under way: `dist.Work`, which PyTorch types in part."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


class Neighbours:
    """
    Sends to the next rank and receives from the previous one, and counters of bytes and waiting.

    Args:
        group (`dist.ProcessGroup`, *optional*): the ranks; all by default.
        first (`int`): first rank that takes part.
        run (`int`): number of the prefill.
    """

    def __init__(self, group: dist.ProcessGroup | None, first: int, run: int) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.before = self.rank - 1 if self.rank > first else None
        self.behind = self.rank + 1 if self.rank < dist.get_world_size(group) - 1 else None
        self.failures = FailureReports(self.rank, run)
        self._arriving: deque[tuple[int, torch.Tensor, Transfer]] = deque()
        self._leaving: deque[tuple[int, torch.Tensor, Transfer]] = deque()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.seconds_waited = 0.0

    def post_receive(self, layer_idx: int, buffer: torch.Tensor) -> None:
        """Post the receive of a layer's message into a contiguous buffer."""
        self._arriving.append((layer_idx, buffer, self._begin(dist.irecv, buffer, self.before, layer_idx)))

    def wait_for(self, layer_idx: int) -> None:
        """Wait until the buffer of a layer is filled; on GPUs the current stream waits."""
        posted_idx, buffer, transfer = self._arriving.popleft()
        assert posted_idx == layer_idx, "layers are received in the order in which they were posted"
        start = time.perf_counter()
        self._guarded(layer_idx, self.before, transfer.wait)
        self.seconds_waited += time.perf_counter() - start
        self.bytes_received += buffer.nbytes

    def send(self, layer_idx: int, tensor: torch.Tensor) -> None:
        """Start to send a contiguous tensor, which must not be written to afterwards, to the next rank."""
        while self._leaving and self._leaving[0][2].is_completed():
            self._finish_send()
        self._leaving.append((layer_idx, tensor, self._begin(dist.isend, tensor, self.behind, layer_idx)))
        self.bytes_sent += tensor.nbytes

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._leaving:
            tensor = self._finish_send()
            if tensor.device.type == "cuda":
                # On GPUs only the stream has waited; the tensor must outlive the transfer
                torch.cuda.current_stream(tensor.device).synchronize()

    def _finish_send(self) -> torch.Tensor:
        layer_idx, tensor, transfer = self._leaving.popleft()
        self._guarded(layer_idx, self.behind, transfer.wait)
        return tensor

    def _begin(
        self, start: Callable[..., Transfer | None], tensor: torch.Tensor, neighbour: int | None, layer_idx: int
    ) -> Transfer:
        assert neighbour is not None, "there is such a neighbour"
        # Point-to-point calls take the rank in the whole world
        other = neighbour if self.group is None else dist.get_global_rank(self.group, neighbour)
        transfer = self._guarded(layer_idx, neighbour, lambda: start(tensor, other, group=self.group, tag=layer_idx))
        assert transfer is not None, "this rank is in the group"
        return transfer

    def _guarded(self, layer_idx: int, neighbour: int | None, operation: Callable[[], Result]) -> Result:
        return self.failures.guarded(operation, f"rank {neighbour}", f"in layer {layer_idx}")
