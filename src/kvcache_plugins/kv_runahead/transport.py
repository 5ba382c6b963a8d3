"""A rank and its two neighbours: what goes from rank to rank, and what is said where one of them fails.

A rank waits for nobody but the one before it. Receives are posted some layers ahead; what is sent is kept until it is
gone. The one collective of a prefill comes before any layer: all ranks compare how they were called.

A rank that fails writes why into the store of the process group, and a rank further down the chain reads it. Every
communication goes through `guarded`, so that whatever ends it is one kind of error.
"""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist


# Receives posted ahead: more would only hold memory for prefixes that the rank before has not computed yet
RECEIVES_AHEAD = 3
Result = TypeVar("Result")


class RunaheadError(RuntimeError):
    """A rank of the chain, named in the message, has failed or does not answer."""


class FailureReports:
    """Reports that the ranks of one prefill, `run`, make of their failures, so that those of others are not read."""

    def __init__(self, rank: int, run: int):
        self._rank, self._key = rank, f"kvcache_plugins/runahead/{run}"

    def guarded(self, operation: Callable[[], Result], other: str, when: str) -> Result:
        """Returns the result of a communication; its failure is a `RunaheadError` that names both ranks and `when`."""
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
        """Leaves word of a failure, if it is the first and the group's store is still there."""
        with suppress(Exception):
            message = f"rank {self._rank} (process {os.getpid()}): {type(error).__name__}: {error}"
            _store().compare_set(self._key, "", message)


def _store() -> Any:
    # PyTorch has no public name for the store that every process group is made with
    return dist.distributed_c10d._get_default_store()


def digest(*tensors: torch.Tensor | None) -> str:
    """Describes integer tensors by their shapes and a digest of their numbers."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(b"-" if tensor is None else tensor.detach().to("cpu", torch.int64).contiguous().numpy().tobytes())
    shapes = ", ".join("none" if tensor is None else "x".join(map(str, tensor.shape)) for tensor in tensors)
    return f"{shapes}: {sha.hexdigest()[:16]}"


def agree(call: Mapping[str, object], group: dist.ProcessGroup | None, failures: FailureReports) -> None:
    """
    Compares what all ranks were called with, by name; a rank that differs, or has an `"error"`, is a `ValueError` on
    every rank.
    """
    calls: list[Any] = [None] * dist.get_world_size(group)
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


class Neighbours:
    """
    Sends to and receives from the ranks beside this one in the prefill number `run`, and counts bytes and waiting.
    """

    def __init__(self, group: dist.ProcessGroup | None, first: int, run: int):
        self.group, self.rank = group, dist.get_rank(group)
        self.before = self.rank - 1 if self.rank > first else None
        self.behind = self.rank + 1 if self.rank < dist.get_world_size(group) - 1 else None
        self.failures = FailureReports(self.rank, run)
        self._arriving: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._leaving: deque[tuple[int, torch.Tensor, Any]] = deque()
        self.bytes_sent, self.bytes_received, self.seconds_waited = 0, 0, 0.0

    def post_receive(self, layer_idx: int, buffer: torch.Tensor) -> None:
        """Announces that `buffer`, contiguous, is to be filled with what the rank before sends for a layer."""
        self._arriving.append((layer_idx, buffer, self._begin(dist.irecv, buffer, self.before, layer_idx)))

    def wait_for(self, layer_idx: int) -> torch.Tensor:
        """Returns the buffer posted for a layer, filled (on GPUs: for what the current stream does next)."""
        posted_idx, buffer, work = self._arriving.popleft()
        assert posted_idx == layer_idx, "layers are received in the order in which they were posted"
        start = time.perf_counter()
        self._guarded(layer_idx, self.before, work.wait)
        self.seconds_waited += time.perf_counter() - start
        self.bytes_received += buffer.nbytes
        return buffer

    def send(self, layer_idx: int, tensor: torch.Tensor) -> None:
        """Starts to send a contiguous tensor, which must not be written to afterwards, to the rank behind."""
        while self._leaving and self._leaving[0][2].is_completed():
            self._finish_send()
        self._leaving.append((layer_idx, tensor, self._begin(dist.isend, tensor, self.behind, layer_idx)))
        self.bytes_sent += tensor.nbytes

    def flush(self) -> None:
        """Waits until everything has been sent."""
        while self._leaving:
            tensor = self._finish_send()
            if tensor.device.type == "cuda":
                # There `wait` is the stream's, not the host's; the tensor must outlive the transfer
                torch.cuda.current_stream(tensor.device).synchronize()

    def _finish_send(self) -> torch.Tensor:
        layer_idx, tensor, work = self._leaving.popleft()
        self._guarded(layer_idx, self.behind, work.wait)
        return tensor

    def _begin(self, start: Callable[..., Any], tensor: torch.Tensor, neighbour: int | None, layer_idx: int) -> Any:
        assert neighbour is not None, "there is such a neighbour"
        # Point-to-point calls want the rank in the whole world
        other = neighbour if self.group is None else dist.get_global_rank(self.group, neighbour)
        return self._guarded(layer_idx, neighbour, lambda: start(tensor, other, group=self.group, tag=layer_idx))

    def _guarded(self, layer_idx: int, neighbour: int | None, operation: Callable[[], Result]) -> Result:
        return self.failures.guarded(operation, f"rank {neighbour}", f"in layer {layer_idx}")
