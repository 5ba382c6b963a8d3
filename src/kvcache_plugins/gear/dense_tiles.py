"""What a layer holds, dense, a tile of tokens at a time and in their order.

    [ before the first block ] [ blocks, tile by tile ] [ exact tokens behind them ]

The exact prefix stands where every item's own first tokens are: before the first block and, in shorter items, within
what the first block spans.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

import torch

from .storage import ExactPrefix


ShapeOf = Callable[[str], tuple[int, int, int, int]]
Tiles = Iterator[tuple[slice, dict[str, torch.Tensor]]]


class TiledBlock(Protocol):
    """Consecutive tokens, compressed."""

    @property
    def start(self) -> int:
        """Position of the first token."""

    def dense_tiles(self, sides: Collection[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Its sides dense, tile by tile."""


def dense_tiles(
    sides: Collection[str],
    shape_of: ShapeOf,
    prefix: ExactPrefix | None,
    blocks: Iterable[TiledBlock],
    tail: Iterable[tuple[torch.Tensor, torch.Tensor, int]],
    exact_start: int,
    dtype: torch.dtype,
    device: torch.device,
    first: int = 0,
) -> Tiles:
    """
    All tokens of a layer, or those from a position on.

    Args:
        sides (`Collection[str]`): which of `"keys"` and `"values"`.
        shape_of (`Callable`): the shape of all states of a side.
        prefix (`ExactPrefix`, *optional*): the first tokens of every item.
        blocks (`Iterable[TiledBlock]`): what is compressed, in the order of its tokens.
        tail (`Iterable`): keys, values and their tokens in use, of what stands behind.
        exact_start (`int`): position of the first token of the tail.
        dtype, device: of the states.
        first (`int`, *optional*, defaults to 0): position of the first token that is wanted, and counted from.
    """
    position = first
    stop = 0 if prefix is None else prefix.stop()
    for block in blocks:
        if position < block.start:
            states = _before(sides, shape_of, prefix, position, block.start, dtype, device)
            yield slice(position - first, block.start - first), states
            position = block.start
        end = block.start
        for tile in block.dense_tiles(sides):
            end += next(iter(tile.values())).shape[2]
            if end <= position:
                continue
            states = {side: tile[side][:, :, position - end :].to(dtype) for side in sides}
            if position < stop:
                _overlay(prefix, states, position)
            yield slice(position - first, end - first), states
            position = end
    if position < exact_start:
        states = _before(sides, shape_of, prefix, position, exact_start, dtype, device)
        yield slice(position - first, exact_start - first), states
        position = exact_start
    end = exact_start
    for keys, values, length in tail:
        end += length
        if end > position:
            skipped = length - (end - position)
            exact = {"keys": keys[:, :, skipped:length], "values": values[:, :, skipped:length]}
            yield slice(position - first, end - first), {side: exact[side] for side in sides}
            position = end


def _before(
    sides: Collection[str],
    shape_of: ShapeOf,
    prefix: ExactPrefix | None,
    start: int,
    stop: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Tokens that are in no block: the prefix, and padding."""
    states = {}
    for side in sides:
        batch_size, num_heads, _, head_dim = shape_of(side)
        states[side] = torch.zeros(batch_size, num_heads, stop - start, head_dim, dtype=dtype, device=device)
    _overlay(prefix, states, start)
    return states


def _overlay(prefix: ExactPrefix | None, states: dict[str, torch.Tensor], start: int) -> None:
    if prefix is None:
        return
    for side, tile in states.items():
        prefix.write_dense(side, tile, start)
