"""Plan of a layer's decode step: attention over everything stored, prepared once for many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvcache_plugins.formats.parts import LayerPart, RowPart
from kvcache_plugins.formats.rows import KeptRows, RowFormats
from kvcache_plugins.kernels.attention import prepare_coding, prepare_tokens
from kvcache_plugins.kernels.cpu_coding import PreparedCoding

from .exact_tokens import ExactTail


class DroppedOnCopy:
    """Mixin for objects that hold raw addresses: copied and pickled as `None`."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class StepPlan(DroppedOnCopy):
    """
    Attention of queries like `query` over prefix, segments and tail of a layer, of which only the tail may grow, and
    the packing of the tail's oldest tokens.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries to plan for.
        parts (`Sequence[Part]`): everything held; the last is the tail.
        num_heads (`int`): key/value heads.
        scale (`float`, *optional*): factor of the scores.
        kernel (`str`): `"compiled"` or `"triton"`.
        limit (`int`): tokens in the tail at which it is packed.
        version (`int`): of the storage. A plan of another version must not be run.
    """

    __slots__ = ("_call", "_encoder", "_packed", "limit", "version")

    def __init__(
        self,
        query: torch.Tensor,
        parts: Sequence[LayerPart],
        num_heads: int,
        scale: float | None,
        kernel: str,
        limit: int,
        version: int,
    ) -> None:
        self._packed = list(parts[:-1])
        self.limit = limit
        self.version = version
        self._call = prepare_tokens(query, parts, num_heads, scale, kernel)
        self._encoder: PreparedCoding | None = None

    @property
    def is_possible(self) -> bool:
        """False if what is stored cannot be read where it is: attention is then computed without a plan."""
        return self._call is not None

    def stage(self, tail: ExactTail, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Leave a token for `run` to write into the tail. Return False if it has to be appended."""
        if self._call is None or tail.unwritten is not None or tail.length >= tail.capacity:
            return False
        newest = self._call.accept(keys, values)
        if newest is None:
            return False
        tail.unwritten = newest
        tail.length += 1
        return True

    def run(self, query: torch.Tensor, scale: float | None, tail: ExactTail) -> torch.Tensor | None:
        """Attend over everything; `None` if the plan is not for such queries."""
        if self._call is None:
            return None
        output = self._call.attend(query, scale, tail.storage, tail.length, tail.unwritten)
        if output is not None:
            tail.unwritten = None
        return output

    def encode(
        self,
        tail: ExactTail,
        formats: tuple[RowFormats | None, RowFormats | None],
        num_kept: int,
        start: int,
        growth: tuple[KeptRows, KeptRows | None],
        padding: torch.Tensor | None,
        largest: float,
    ) -> list[torch.Tensor] | None:
        """Encode all but the newest `num_kept` tokens of the tail behind the newest rows."""
        own, older = formats
        if self._call is None or own is None or older is None:
            return None
        states, count = tail.tensors(), tail.length - num_kept
        encoder = self._encoder
        if encoder is None or encoder.formats is not own or encoder.padding is not padding:
            encoder = prepare_coding(own, older, states[0], padding, largest)
            self._encoder = encoder
        if encoder is None:
            return None
        is_moved = tail.capacity_without(count) == tail.capacity
        rows = encoder.append(states, count, start, growth[0], is_moved * num_kept, growth[1])
        if rows is not None:
            if is_moved:
                tail.length -= count
            else:
                with torch.inference_mode(False):
                    tail.drop_first(count)
        return rows

    def replace_rows(self, parts: Sequence[LayerPart], version: int) -> bool:
        """Replace the newest row parts. Return False if they do not fit; the plan is of no use then."""
        first = len(self._packed) - len(parts)
        for index, part in enumerate(parts, start=first):
            before = self._packed[index]
            assert isinstance(before, RowPart) and isinstance(part, RowPart)
            if before.mask is not None and part.positions.first != before.positions.first:
                # Its columns would be others
                return False
            self._packed[index] = replace(part, mask=before.mask)
        if self._call is None or not self._call.extend(self._packed[first:]):
            return False
        self.version = version
        return True
