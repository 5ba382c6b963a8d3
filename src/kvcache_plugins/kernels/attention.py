"""Attention of queries over all parts of a layer, by whatever computes it: once, or prepared for tokens to come.

What is neither compiled nor Triton's is the reference in plain PyTorch, a tile of tokens at a time: a layer's dense
keys and values are never whole in memory, nor is the matrix of scores.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, T tokens of a tile, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from kvcache_plugins.formats.parts import DensePart, GroupPart, LayerPart, OpaqueRowPart, PagedRowPart, Part
from kvcache_plugins.formats.rows import RowFormats

from .c_structs import KINDS, MAX_CHANNELS
from .compiled import GrowingStates, PreparedCall
from .cpu_coding import PreparedCoding
from .engine import choose_coding_kernel, load_triton
from .masks import slice_mask
from .online_attention import OnlineAttention
from .ops import decode_tiles


class PlannedAttention(Protocol):
    """Attention of single tokens by launches of Triton's kernels that are kept; see `triton.KeptAttention`."""

    def __call__(self, query: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens."""

    def attend(self, query: torch.Tensor, scale: float | None, tail: GrowingStates) -> torch.Tensor | None:
        """Attend to parts and tail, the last exact part; `None` for queries that are not like the planned ones."""


def attend(
    query: torch.Tensor,
    parts: Iterable[Part | OpaqueRowPart],
    num_key_value_heads: int,
    scale: float | None = None,
    kernel: str = "torch",
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attend over all parts of a cache.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        parts (`Iterable[Part | OpaqueRowPart]`): what is attended to, each token in one part.
        num_key_value_heads (`int`): H.
        scale (`float`, *optional*, defaults to `1 / sqrt(D)`): factor of the scores.
        kernel (`str`, *optional*, defaults to `"torch"`): what computes, as `engine.choose_kernel` says.
        softcap, sinks (*optional*):
            As in `AttentionCall`, which only PyTorch's kernel knows.

    Returns:
        `torch.Tensor` of shape `[B, H * G, Q, value head dim]` in the queries' dtype.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if kernel != "torch":
        native = list_native(parts)
        parts = native
        if kernel == "compiled" and max(native[0].head_dims) <= MAX_CHANNELS:
            own = query if query.dtype in KINDS else query.float()
            result = PreparedCall(own, native, num_key_value_heads, scale).attend(own, scale)
            assert result is not None, "the call is for this query"
            return result.to(query.dtype)
        # Without packed parts PyTorch's own steps are the fast ones
        if kernel == "triton" and any(not isinstance(part, DensePart) for part in native):
            output: torch.Tensor = load_triton().attend(query, native, num_key_value_heads, scale)
            return output
    attention = OnlineAttention(query, num_key_value_heads, scale, softcap, sinks)
    # One after another: a part may be copied from elsewhere, and not all may fit into memory at once
    for each in parts:
        part = each.gathered() if isinstance(each, PagedRowPart) else each
        for keys, values, start, stop in decode_tiles(part):
            attention.add_tile(keys, values, slice_mask(part.mask, start, stop))
    return attention.result()


def list_native(parts: Iterable[Part | OpaqueRowPart]) -> list[Part]:
    """List parts for kernels, which read no rows that only a codec reads."""
    native = []
    for part in parts:
        assert not isinstance(part, OpaqueRowPart), "codecs without kernels are read in PyTorch"
        native.append(part)
    return native


def can_attend(query: torch.Tensor, parts: Sequence[LayerPart]) -> bool:
    """Return True if the C kernel attends with queries like `query` over parts."""
    return max(list_native(parts)[0].head_dims) <= MAX_CHANNELS and query.dtype in KINDS


def prepare_triton(
    query: torch.Tensor, parts: Sequence[LayerPart], num_key_value_heads: int, scale: float | None
) -> PlannedAttention | None:
    """
    Prepare attention of queries like `query` by Triton's kernels. The last part is exact and grows, all others stay.
    `None` unless some are groups: a layer of rows has a plan of its own (`layers.device_plan`).
    """
    native = list_native(parts)
    if not any(isinstance(part, GroupPart) for part in native):
        return None
    planned: PlannedAttention | None = load_triton().keep_attention(query, native, num_key_value_heads, scale)
    return planned


def prepare_coding(
    formats: RowFormats, older: RowFormats, states: torch.Tensor, padding: torch.Tensor | None, limit: float
) -> PreparedCoding | None:
    """
    Prepare the encoding of tokens to come, states `[B, H, any, D]`, as rows behind others, and of such rows as those
    of `older` formats; `None` if compiled kernels do not encode them. Numbers have to be below `limit`.
    """
    most = max(each.head_dim for each in formats)
    if states.dtype not in KINDS or choose_coding_kernel(states, most) != "compiled":
        return None
    return PreparedCoding(formats, older, padding, limit)
