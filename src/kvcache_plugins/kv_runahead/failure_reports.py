"""Word of the first failure, for the ranks that only see their own neighbour end.

A rank that fails writes why into the store of the process group, if that outlives it, and a rank further down the
chain reads it. Every communication goes through `guarded`, so that whatever ends it is one kind of error.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist


Result = TypeVar("Result")
_STORE_KEY = "kvcache_plugins/runahead"


class RunaheadError(RuntimeError):
    """A rank of the chain, named in the message, has failed or does not answer."""


class FailureReports:
    """
    What the ranks of one prefill say of their failures.

    Args:
        rank (`int`): this rank, in the group.
        run (`int`): number of the prefill, the same on all ranks, so that failures of earlier ones are not read again.
    """

    def __init__(self, rank: int, run: int):
        self._rank, self._key = rank, f"{_STORE_KEY}/{run}"

    def guarded(self, operation: Callable[[], Result], other: str, when: str) -> Result:
        """
        What a communication returns.

        Raises:
            RunaheadError: if it fails; with this rank, the `other` one, and `when` that was.
        """
        try:
            result = operation()
        except (RuntimeError, ValueError) as error:
            cause = self.first()
            reason = f" The first failure reported: {cause}." if cause else ""
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

    def first(self) -> str | None:
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
