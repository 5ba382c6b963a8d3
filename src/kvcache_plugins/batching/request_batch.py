"""Requests of one pass of a batch, and where their tokens are in blocks of exact tokens and of rows.

Legend: B requests, Q new tokens of a request, S sink tokens, N recent tokens, see `paged_allocator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch


class BlockLayout(NamedTuple):
    """
    Sizes of blocks, and the blocks that a request's table begins with.

    Attributes:
        num_sink_tokens, num_recent_tokens (`int`): exact tokens of a request.
        exact_per_block (`int`): exact tokens that fit into a block, X.
        rows_per_block (`int`): rows of a block, P.
    """

    num_sink_tokens: int
    num_recent_tokens: int
    exact_per_block: int
    rows_per_block: int

    @property
    def num_sink_blocks(self) -> int:
        """Number of blocks at the beginning of a table that hold sink tokens."""
        return ceil(self.num_sink_tokens / self.exact_per_block)

    @property
    def num_recent_blocks(self) -> int:
        """Number of blocks that hold recent tokens."""
        return ceil(self.num_recent_tokens / self.exact_per_block)

    @property
    def num_exact_blocks(self) -> int:
        """Number of blocks before those of rows."""
        return self.num_sink_blocks + self.num_recent_blocks

    def recent_slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of recent tokens, counted from the first exact block of their request."""
        return self.num_sink_blocks * self.exact_per_block + positions % max(self.num_recent_tokens, 1)

    def find_exact(self, tables: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block, and slot within it, of exact slots `[B, any]`, given block tables `[B, most]`."""
        return tables.gather(1, slots // self.exact_per_block), slots % self.exact_per_block


class Request(NamedTuple):
    """
    One request of a pass.

    Attributes:
        first (`int`): index of its first new token in the pass.
        num_new, past (`int`): number of new tokens, and of those before them.
        table (`list[int]`): its blocks.
    """

    first: int
    num_new: int
    past: int
    table: list[int]


class RequestBatch(NamedTuple):
    """
    Requests of one pass that have equally many new tokens, Q each, and where their tokens are stored.

    Attributes:
        tokens (`torch.Tensor` of shape `[B, Q]`): indices of the new tokens in the pass.
        past (`torch.Tensor` of shape `[B]`): number of tokens before the new ones.
        blocks (`torch.Tensor` of shape `[B, most]`): blocks of rows.
        num_rows (`torch.Tensor` of shape `[B]`): end of the rows that new tokens attend to; 0 if all are exact.
        mask (`torch.Tensor` of shape `[B, 1, Q, S + N + Q]`): added to the scores of exact tokens.
        exact_slots (two `torch.Tensor` of shape `[B, S + N]`): block and slot of each exact token before the new ones.
        empty_slots_mask (`torch.Tensor` of shape `[B, S + N]`, *optional*): mask of exact slots without a token;
            `None` if all are filled.
        new_rows (two `torch.Tensor` of shape `[B * Q]`): block and slot of each new token's row.
        new_exact (three `torch.Tensor`): index among `[B * Q]`, block and slot of each new token that is kept exact.
    """

    tokens: torch.Tensor
    past: torch.Tensor
    blocks: torch.Tensor
    num_rows: torch.Tensor
    mask: torch.Tensor
    exact_slots: tuple[torch.Tensor, torch.Tensor]
    empty_slots_mask: torch.Tensor | None
    new_rows: tuple[torch.Tensor, torch.Tensor]
    new_exact: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def locate(cls, requests: Sequence[Request], layout: BlockLayout, device: torch.device) -> RequestBatch:
        """Find where all tokens of some requests are stored."""
        num_sinks, num_new = layout.num_sink_tokens, requests[0].num_new
        most = max(len(request.table) for request in requests)
        tables = _integers([request.table + [0] * (most - len(request.table)) for request in requests], device)
        past = _integers([request.past for request in requests], device)
        new = _integers(range(num_new), device)
        tokens = _integers([request.first for request in requests], device)[:, None] + new  # [B, Q]
        positions = past[:, None] + new  # [B, Q]
        sinks = _integers(range(num_sinks), device).expand(len(requests), -1)  # [B, S]
        recent = past[:, None] + _integers(range(-layout.num_recent_tokens, 0), device)  # [B, N]
        is_filled = torch.cat((sinks < past[:, None], recent >= num_sinks), dim=1)  # [B, S + N]
        exact_slots = torch.cat((sinks, layout.recent_slots(recent.clamp(min=0))), dim=1)
        num_rows = past - is_filled[:, num_sinks:].sum(dim=1)
        blocks = tables[:, layout.num_exact_blocks :].contiguous()
        size = layout.rows_per_block
        return cls(
            tokens=tokens,
            past=past,
            blocks=blocks,
            num_rows=torch.where(num_rows > num_sinks, num_rows, 0),
            mask=_mask_exact(is_filled, num_new),
            exact_slots=layout.find_exact(tables, exact_slots),
            empty_slots_mask=None if bool(is_filled.all()) else ~is_filled,
            new_rows=(blocks.gather(1, positions // size).flatten(), (positions % size).flatten()),
            new_exact=_keep_exact(positions, tables, layout),
        )

    def select(self, states: torch.Tensor) -> torch.Tensor:
        """Select the states `[B, H, Q, D]` of the batch's new tokens from those `[1, H, tokens, D]` of a pass."""
        return states[0].transpose(0, 1)[self.tokens].transpose(1, 2)


def _integers(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _mask_exact(is_filled: torch.Tensor, num_new: int) -> torch.Tensor:
    """Make the mask `[B, 1, Q, S + N + Q]` of new tokens over filled slots `[B, S + N]` and each other."""
    batch_size, num_slots = is_filled.shape
    shape = (batch_size, 1, num_new, num_slots + num_new)
    mask = torch.zeros(shape, dtype=torch.float32, device=is_filled.device)
    mask[..., :num_slots].masked_fill_(~is_filled[:, None, None], -torch.inf)
    is_future = torch.ones(num_new, num_new, dtype=torch.bool, device=is_filled.device).triu(1)
    mask[..., num_slots:].masked_fill_(is_future, -torch.inf)
    return mask


def _keep_exact(
    positions: torch.Tensor, tables: torch.Tensor, layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the new tokens at `positions` `[B, Q]` that are kept exact: their index, block and slot."""
    is_sink = positions < layout.num_sink_tokens
    is_recent = positions > positions[:, -1:] - layout.num_recent_tokens
    found = []
    for slots, is_kept in ((positions, is_sink), (layout.recent_slots(positions), is_recent)):
        kept = is_kept.flatten().nonzero()[:, 0]
        blocks, own_slots = layout.find_exact(tables, slots.where(is_kept, 0))
        found.append((kept, blocks.flatten()[kept], own_slots.flatten()[kept]))
    sinks, recent = found
    return torch.cat((sinks[0], recent[0])), torch.cat((sinks[1], recent[1])), torch.cat((sinks[2], recent[2]))
