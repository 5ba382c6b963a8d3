"""Plans of a layer's decode steps: everything that an engine prepares once and uses for many tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache_plugins.formats.parts import LayerPart, OpaqueRowPart, RowPart
from kvcache_plugins.formats.rows import KeptRows, RowFormats
from kvcache_plugins.kernels.attention import PlannedAttention, can_attend, list_native, prepare_coding, prepare_triton
from kvcache_plugins.kernels.compiled import PreparedCall
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
    Decode steps of a layer by one engine. This plan, of no engine, records that none can read what is stored.

    Attributes:
        version (`int`): of the storage that the plan was made for. A plan of another version must not be run.
        limit (`int`): tokens in the tail at which the next push packs.
        is_of_queries (`bool`): True if another plan may be for queries that this one does not answer.
        writes_newest (`bool`): True if `attend` writes the newest token of the tail, which may wait `unwritten`.
    """

    __slots__ = ("limit", "version")
    is_of_queries = False
    writes_newest = False

    def __init__(self, version: int, limit: int) -> None:
        self.version = version
        self.limit = limit

    def push(self, tail: ExactTail, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Store a token `[B, H, 1, D]`. Return False if it has to be appended to the tail."""
        return False

    def attend(self, query: torch.Tensor, scale: float | None, tail: ExactTail) -> torch.Tensor | None:
        """Attend with queries `[B, H * G, Q, D]` over everything; `None` if the plan is not for such queries."""
        return None


class CompiledPlan(PreparedCall, StepPlan):
    """
    Steps in C over prefix, segments and a tail that may grow, and the packing of its oldest tokens.

    Args:
        query, num_heads, scale: see `plan_steps`.
        parts (`Sequence[LayerPart]`): everything held; the last is the tail.
        version, limit: see `StepPlan`.
    """

    is_of_queries = True
    writes_newest = True

    def __init__(
        self,
        query: torch.Tensor,
        parts: Sequence[LayerPart],
        num_heads: int,
        scale: float,
        version: int,
        limit: int,
    ) -> None:
        PreparedCall.__init__(self, query, list_native(parts), num_heads, scale)
        StepPlan.__init__(self, version, limit)
        self._encoder: PreparedCoding | None = None

    def encode(
        self,
        tail: ExactTail,
        formats: tuple[RowFormats, RowFormats],
        num_kept: int,
        start: int,
        growth: tuple[KeptRows, KeptRows | None],
        padding: torch.Tensor | None,
        largest: float,
    ) -> list[torch.Tensor] | None:
        """
        Encode all but the newest `num_kept` tokens of the tail behind the newest rows, and rows that these replace
        behind the older ones.

        Args:
            formats: formats of the newest rows and of older ones.
            start (`int`): position of the tail's first token.
            growth: rows that stay, newest and older.
            padding (`torch.Tensor` of shape `[B]`, *optional*): left padding.
            largest (`float`): exclusive bound on the magnitude of numbers.

        Returns:
            `list[torch.Tensor]`: storage of the rows of keys and of values, newest and older. `None` if the kernel
            does not encode such tokens; nothing has changed then.
        """
        own, older = formats
        states, count = tail.tensors(), tail.length - num_kept
        encoder = self._encoder
        if encoder is None or encoder.formats is not own or encoder.padding is not padding:
            encoder = prepare_coding(own, older, states[0], padding, largest)
            self._encoder = encoder
        if encoder is None:
            return None
        # Without a change of capacity the kernel moves the tokens that stay to the front
        keeps_storage = tail.capacity_without(count) == tail.capacity
        others = None
        if not keeps_storage:
            with torch.inference_mode(False):
                others = tail.copy_without(count)
        rows = encoder.append(states, count, start, growth[0], num_kept if keeps_storage else 0, growth[1])
        if rows is None:
            return None
        if others is None:
            tail.length -= count
        else:
            tail.drop_first(count, others)
        return rows

    def replace_rows(self, parts: Sequence[RowPart | OpaqueRowPart], version: int) -> bool:
        """Replace the newest row parts. Return False if they do not fit; the plan is of no use then."""
        if not self.extend(parts):
            return False
        self.version = version
        return True


class TritonPlan(StepPlan):
    """Attention over groups by kept launches of Triton's kernels; PyTorch appends tokens to the tail."""

    __slots__ = ("_attention",)
    is_of_queries = True

    def __init__(self, attention: PlannedAttention, version: int, limit: int) -> None:
        super().__init__(version, limit)
        self._attention = attention

    def attend(self, query: torch.Tensor, scale: float | None, tail: ExactTail) -> torch.Tensor | None:
        return self._attention.attend(query, scale, tail)


def plan_steps(
    query: torch.Tensor,
    parts: Sequence[LayerPart],
    num_heads: int,
    scale: float | None,
    kernel: str,
    version: int,
    limit: int,
) -> StepPlan:
    """
    Plan decode steps of queries like `query` `[B, H * G, Q, D]` by `"compiled"` or `"triton"` kernels, over parts of
    which the last is the tail.
    """
    if kernel == "compiled" and can_attend(query, parts):
        scale = query.shape[3] ** -0.5 if scale is None else scale
        plan = CompiledPlan(query, parts, num_heads, scale, version, limit)
        if plan.is_lasting:
            return plan
    elif kernel == "triton":
        attention = prepare_triton(query, parts, num_heads, scale)
        if attention is not None:
            return TritonPlan(attention, version, limit)
    return StepPlan(version, limit)
