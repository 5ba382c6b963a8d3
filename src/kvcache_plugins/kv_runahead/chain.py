"""A rank's part in one prefill: its layers during the forward over its slice, whether that ends well or not."""

from __future__ import annotations

from types import TracebackType

from transformers import Cache

from .exchange import PrefixExchange
from .failure_reports import RunaheadError
from .handover import Handover
from .layer import RunaheadLayer


class Chain:
    """
    Used in a `with` statement around one forward.

    Args:
        exchange (`PrefixExchange`): how the rank gets what comes before its slice.
        is_lazy (`bool`): whether attention is by `sdpa`.
        cache (`Cache`, *optional*): the user's empty cache, on the last rank.

    Attributes:
        cache (`Cache`): inside of the `with` statement, what the forward takes as `past_key_values`.
    """

    cache: Cache

    def __init__(self, exchange: PrefixExchange, *, is_lazy: bool, cache: Cache | None):
        self.exchange, self.prompt_slice = exchange, exchange.prompt_slice
        self._handover = Handover(self.prompt_slice, cache)
        self._layers = [
            RunaheadLayer(exchange, self._handover, index, shape.window, is_lazy=is_lazy)
            for index, shape in enumerate(exchange.shapes)
        ]

    def __enter__(self) -> Chain:
        self.cache = self._handover.replace_layers(self._layers)
        try:
            self.exchange.start()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._handover.finish_layer()
                self.exchange.finish()
        except BaseException as late:
            error = late
            raise
        finally:
            self._end(error)
        if error is not None and isinstance(error, Exception) and not isinstance(error, (RunaheadError, ValueError)):
            raise RunaheadError(f"rank {self.exchange.neighbours.rank}: {type(error).__name__}: {error}") from error

    def _end(self, error: BaseException | None) -> None:
        self._handover.put_back(complete=error is None)
        if error is not None:
            self.exchange.neighbours.failures.add(error)
