"""The chain of ranks: what comes from the rank before, and what goes to the rank behind.

Point to point, and never a collective between the layers: a rank waits for nobody but the one before it. Receives are
posted some layers ahead; sends are not waited for, and what is sent is kept until it is gone.

A rank that fails writes why into the store of the process group, if that outlives it. So a rank further down, which
only sees its own neighbour end, can name the first cause.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist


# Receives posted ahead: more would only hold memory for prefixes that the rank before has not computed yet
RECEIVES_AHEAD = 3
_STORE_KEY = "kvcache_plugins/runahead"


class RunaheadError(RuntimeError):
    """A rank of the chain, named in the message, has failed or does not answer."""


class Neighbours:
    """
    A rank's two neighbours.

    Args:
        group (`dist.ProcessGroup`, *optional*): the group; the default one if not given.
        first (`int`): the first rank of the group that takes part, up to its last.
        run (`int`): number of the prefill, the same on all ranks, so that failures of earlier ones are not read again.

    Attributes:
        rank (`int`): this rank, in the group.
        bytes_sent, bytes_received (`int`): what has gone over the two links.
        seconds_waited (`float`): time that the host waited for what was to come; on GPUs it does not wait.
    """

    def __init__(self, group: dist.ProcessGroup | None, first: int, run: int):
        self.group, self.rank = group, dist.get_rank(group)
        size = dist.get_world_size(group)
        self.before = self.rank - 1 if self.rank > first else None
        self.behind = self.rank + 1 if self.rank < size - 1 else None
        self._key = f"{_STORE_KEY}/{run}"
        self._arriving: deque[tuple[int, torch.Tensor, dist.Work]] = deque()
        self._leaving: deque[tuple[int, torch.Tensor, dist.Work]] = deque()
        self.bytes_sent, self.bytes_received, self.seconds_waited = 0, 0, 0.0

    def _neighbour(self, rank: int) -> int:
        """Rank of the whole world, which point-to-point calls want."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def post_receive(self, layer_idx: int, buffer: torch.Tensor) -> None:
        """Announces that `buffer`, contiguous, is to be filled with what the rank before sends for a layer."""
        assert self.before is not None
        source = self._neighbour(self.before)
        work = self._guarded(
            layer_idx, self.before, lambda: dist.irecv(buffer, src=source, group=self.group, tag=layer_idx)
        )
        self._arriving.append((layer_idx, buffer, work))

    @property
    def num_posted(self) -> int:
        """Receives that are under way."""
        return len(self._arriving)

    def wait_for(self, layer_idx: int) -> torch.Tensor:
        """The buffer posted for a layer, once it is filled (on GPUs: for what the current stream does next)."""
        assert self.before is not None
        posted_idx, buffer, work = self._arriving.popleft()
        assert posted_idx == layer_idx, "layers are received in the order in which they were posted"
        start = time.perf_counter()
        self._guarded(layer_idx, self.before, work.wait)
        self.seconds_waited += time.perf_counter() - start
        self.bytes_received += buffer.nbytes
        return buffer

    def send(self, layer_idx: int, tensor: torch.Tensor) -> None:
        """Starts to send a contiguous tensor, which must not be written to afterwards, to the rank behind."""
        assert self.behind is not None
        self._drop_sent()
        target = self._neighbour(self.behind)
        work = self._guarded(
            layer_idx, self.behind, lambda: dist.isend(tensor, dst=target, group=self.group, tag=layer_idx)
        )
        self._leaving.append((layer_idx, tensor, work))
        self.bytes_sent += tensor.nbytes

    def _drop_sent(self) -> None:
        """Lets go of what has gone, without waiting for more."""
        while self._leaving and self._leaving[0][2].is_completed():
            layer_idx, _, work = self._leaving.popleft()
            assert self.behind is not None
            self._guarded(layer_idx, self.behind, work.wait)

    def flush(self) -> None:
        """Waits until everything has been sent."""
        while self._leaving:
            layer_idx, tensor, work = self._leaving.popleft()
            assert self.behind is not None
            self._guarded(layer_idx, self.behind, work.wait)
            if tensor.device.type == "cuda":
                # There `wait` is the stream's, not the host's; the tensor must outlive the transfer
                torch.cuda.current_stream(tensor.device).synchronize()

    def _guarded(self, layer_idx: int, neighbour: int, operation: Callable[[], Any]) -> Any:
        try:
            result = operation()
        except (RuntimeError, ValueError) as error:
            cause = self.reported_failure()
            reason = f" The first failure reported: {cause}." if cause else ""
            raise RunaheadError(
                f"rank {self.rank}: rank {neighbour} did not answer in layer {layer_idx}; it has ended or hangs."
                f"{reason}"
            ) from error
        if result is False:
            raise RunaheadError(f"rank {self.rank}: rank {neighbour} timed out in layer {layer_idx}")
        return result

    def report_failure(self, error: BaseException) -> None:
        """Leaves word of the first failure for the other ranks, if the group's store is still there."""
        with suppress(Exception):
            message = f"rank {self.rank} (process {os.getpid()}): {type(error).__name__}: {error}"
            _store().compare_set(self._key, "", message)

    def reported_failure(self) -> str | None:
        """What the first rank that failed said, if it could."""
        with suppress(Exception):
            store = _store()
            if store.check([self._key]):
                message: str = store.get(self._key).decode()
                return message
        return None


def _store() -> Any:
    # PyTorch has no public name for the store that every process group is made with
    return dist.distributed_c10d._get_default_store()
