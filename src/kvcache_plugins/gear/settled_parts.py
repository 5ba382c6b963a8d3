"""What attention of a layer goes over from one token to the next: all but the buffer stays, until it is compressed."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.ops.parts import DensePart


if TYPE_CHECKING:
    from kvcache_plugins.kernels.layer import PreparedCall

    # Mixed in: no class between a layer and `PromptLayer`
    _Base = PromptLayer
else:
    # As of all layers, so that a layer may be given the class of one that keeps recurrent states too
    _Base = ABC


class SettledParts:
    """
    The parts before the buffer, where no mask is given.

    Attributes:
        parts (`list`): those.
        limit (`int`): tokens that the buffer may hold before anything changes.
        call (`PreparedCall`, *optional*): attention over them and the buffer.
        is_tried (`bool`): whether there is a call, if there can be one.
    """

    __slots__ = ("call", "is_tried", "limit", "parts")

    def __init__(self, parts: list[Any], limit: int):
        self.parts, self.limit = parts, limit
        self.call: PreparedCall | None = None
        self.is_tried = False

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the layer finds its own: addresses in a call are of what was copied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class SettledPartsMixin(_Base):
    """
    Mixed into a `PromptLayer` whose newest tokens are in a buffer, before it. It says how attention is called over
    parts that stay (`_token_call`), and forgets them (`_settled`) when anything but the buffer's end changes.
    """

    buffer: ResidualBuffer | None
    # Where no mask is given
    _settled: SettledParts | None

    @abstractmethod
    def _token_call(self, query: torch.Tensor, parts: list[Any], scale: float | None) -> "PreparedCall | None":
        """A call for tokens to come, by the compiled kernel, over parts of which the last one is the buffer."""

    def _attend_again(self, query: torch.Tensor, scale: float | None) -> torch.Tensor | None:
        """Attention as of the token before, by the same call; `None` where there is none."""
        settled = self._settled
        if settled is None or settled.call is None or self.buffer is None or torch.compiler.is_dynamo_compiling():
            return None
        if query.requires_grad or not settled.call.fits(query, scale):
            return None
        self._counters["attend_calls"] += 1
        self._counters["fused_calls"] += 1
        buffer = self.buffer
        output = settled.call.attend(query, buffer.room(), buffer.length, buffer.left)
        # It has been written
        buffer.left = None
        return output

    def _prepare_call(self, query: torch.Tensor, scale: float | None) -> None:
        """Makes a call for the tokens to come, if all that they change is the buffer."""
        settled, buffer = self._settled, self.buffer
        if settled is None or settled.is_tried or settled.limit == 0 or buffer is None or self._needs_queries:
            return
        settled.is_tried = True
        if buffer.length and not torch.compiler.is_dynamo_compiling():
            newest = DensePart(*buffer.tensors(), buffer.length, None)
            settled.call = self._token_call(query, [*settled.parts, newest], scale)

    def _leaves(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Adds a token that attention, called as before, will write into the buffer: whether it could be added."""
        settled, buffer = self._settled, self.buffer
        return settled is not None and settled.call is not None and buffer is not None and buffer.leave(keys, values)

    def _has_room(self) -> bool:
        """See `PromptLayer._has_room`."""
        return self._settled is not None and self.buffer is not None and self.buffer.length < self._settled.limit
