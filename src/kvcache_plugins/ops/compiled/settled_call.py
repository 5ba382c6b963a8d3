"""Attention of one new token after another, where only the exact tokens at the end of a cache grow.

In a model's step the weights of a layer drive everything else out of the machine's caches, so that whatever Python
touches comes from memory: tables and parts made anew for every token would cost several times what attention does.
So the table of a call is kept, and of it only addresses and one length are written.
"""

from array import array
from typing import Any

import torch

from .calls import DONE, FIRST_PART, LENGTH, NEWEST, OWN, QUERY
from .threads import COUNT, NEXT, entry_of, num_threads, run_at


# Of one number
_ROOM = array("f", (0.0,))


class SettledCall:
    """
    A call for queries of one shape, over parts of which the last is exact and all others stay as they are.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries like those to come.
        scale (`float`): factor of the scores.
        worker: what attends; see `calls`.
        table (`array`): its numbers, but for the addresses of queries and results.
        scratch_size (`int`): numbers that there have to be room for.
        result_shape (`tuple[int, ...]`): what attention returns.
        exact_kind (`tuple`): of the last part's keys and values what `kind_of_tokens` says.
        arguments: what the table has addresses of, to be kept alive.
    """

    def __init__(
        self,
        query: torch.Tensor,
        scale: float,
        worker: Any,
        table: "array[int]",
        scratch_size: int,
        result_shape: tuple[int, ...],
        exact_kind: tuple[object, object],
        arguments: object,
    ):
        self._kind, self._scale, self._num_threads = (query.shape, query.dtype), scale, num_threads()
        self._entry, self._table = entry_of(worker), table
        self._scratch_size, self._result_shape, self._arguments = scratch_size, result_shape, arguments
        self._address, self._num_running = table.buffer_info()[0], min(self._num_threads, table[COUNT])
        self._last = len(table) - table[FIRST_PART - 1]
        self._exact: torch.Tensor | None = None
        self._exact_kind = exact_kind
        # What is like another tensor is made in half the time
        self._is_like_query = tuple(query.shape) == result_shape

    def fits(self, query: torch.Tensor, scale: float | None) -> bool:
        """Whether queries are of the kind, and threads as many as there were."""
        return (
            (query.shape, query.dtype) == self._kind
            and (query.shape[3] ** -0.5 if scale is None else scale) == self._scale
            and num_threads() == self._num_threads
        )

    def attend(
        self,
        query: torch.Tensor,
        exact: tuple[torch.Tensor, torch.Tensor],
        length: int,
        newest: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """
        Attention over all parts.

        Args:
            query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries that fit.
            exact (two `torch.Tensor` of shape `[B, H, at least T, D]`): keys and values that the last part is now,
                contiguous and of the dtype that it had.
            length (`int`): its tokens in use, T.
            newest (two `torch.Tensor` of shape `[B, H, 1, D]`, *optional*): the last of them, contiguous and of the
                same dtype, if it is to be written there.

        Returns:
            `torch.Tensor` of shape `[B, H * G, Q, value head dim]`, in the queries' dtype.
        """
        table, last = self._table, self._last
        if exact[0] is not self._exact:
            keys, values = exact
            if (kind_of_tokens(keys), kind_of_tokens(values)) != self._exact_kind:
                raise ValueError(f"exact tokens have to be {self._exact_kind}, as when the call was prepared")
            table[last + OWN], table[last + OWN + 1] = keys.data_ptr(), values.data_ptr()
            table[last + OWN + 2], self._exact = keys.shape[2], keys
        table[last + NEWEST], table[last + NEWEST + 1] = (
            (0, 0) if newest is None else (newest[0].data_ptr(), newest[1].data_ptr())
        )
        queries = query if query.dtype is torch.float32 else query.float()
        if not queries.is_contiguous():
            queries = queries.contiguous()
        # No tensor, which would take longer to be made
        scratch = _ROOM * self._scratch_size
        result = torch.empty_like(queries) if self._is_like_query else torch.empty(self._result_shape)
        table[NEXT] = table[DONE] = 0
        table[QUERY], table[QUERY + 1] = queries.data_ptr(), scratch.buffer_info()[0]
        table[QUERY + 2] = result.data_ptr()
        table[last + LENGTH] = length
        run_at(self._entry, self._address, self._num_running)
        return result if query.dtype is torch.float32 else result.to(query.dtype)


def kind_of_tokens(states: torch.Tensor) -> tuple[object, ...]:
    """What is believed of tokens `[B, H, any, D]` that are read by address."""
    return states.shape[0], states.shape[1], states.shape[3], states.dtype, states.is_contiguous()
