"""The chain of ranks: what comes from the rank before, and what goes to the rank behind.

Point to point, and never a collective between the layers: a rank waits for nobody but the one before it. Receives are
posted some layers ahead; sends are not waited for, and what is sent is kept until it is gone.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from .failure_reports import FailureReports


# Receives posted ahead: more would only hold memory for prefixes that the rank before has not computed yet
RECEIVES_AHEAD = 3
Result = TypeVar("Result")


class Neighbours:
    """
    A rank's two neighbours.

    Args:
        group (`dist.ProcessGroup`, *optional*): the group; the default one if not given.
        first (`int`): the first rank of the group that takes part, up to its last.
        run (`int`): number of the prefill, the same on all ranks.

    Attributes:
        rank (`int`), first (`int`): this rank and the first that takes part, in the group.
        bytes_sent, bytes_received (`int`): what has gone over the two links.
        seconds_waited (`float`): time that the host waited for what was to come; on GPUs it does not wait.
        failures (`FailureReports`): what the ranks say of their failures.
    """

    def __init__(self, group: dist.ProcessGroup | None, first: int, run: int):
        self.group, self.rank, self.first = group, dist.get_rank(group), first
        size = dist.get_world_size(group)
        self.before = self.rank - 1 if self.rank > first else None
        self.behind = self.rank + 1 if self.rank < size - 1 else None
        self.failures = FailureReports(self.rank, run)
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
        assert work is not None, "this rank is of the group"
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
        assert work is not None, "this rank is of the group"
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

    def _guarded(self, layer_idx: int, neighbour: int, operation: Callable[[], Result]) -> Result:
        return self.failures.guarded(operation, f"rank {neighbour}", f"in layer {layer_idx}")
