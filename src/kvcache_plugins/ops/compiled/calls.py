"""How attention is called: one table of numbers for all parts of a layer, and one worker for all of its tasks.

    [ next task | tasks | tasks done | shape, scale, addresses | part | part | ... ]

A part is where its tasks and its partial results begin, its mask and its tokens, and from `OWN` on what its kind of
storage needs. Whoever ends the last task merges the results.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, D head dim.
"""

from typing import Any, NamedTuple

from numba import njit

from .arrays import doubles_at, longs_at
from .primitives import OPTIONS
from .threads import FIRST, bits_of


# Places in the table: tasks that are done; shape; scale, as float64; addresses of queries, of the partial results and
# of what is returned; how many parts there are, and numbers of each
DONE = FIRST
_SHAPE, _SCALE, QUERY, FIRST_PART = DONE + 1, DONE + 8, DONE + 9, DONE + 14
# In a part: first task and first partial result; address of a mask and its four dimensions; tokens in use, tiles of a
# task and runs of tiles; what exact tokens are stored as; what else it needs
_MASK, LENGTH, _EXACT, OWN = 2, 7, 10, 11
# Of exact tokens, behind what else they need: addresses of keys and values of the last one, if it is to be written
NEWEST = OWN + 3
_LONG = 8


class Call(NamedTuple):
    """
    What all parts have in common.

    Attributes:
        shape: B, H, G, Q, D, head dim of values, and partial results in all.
        scale: factor of the scores.
        query: address of `[B, H * G, Q, D]`, float32.
        scratch: address of the partial results, see `exact.partial_results`.
        result: address of `[B, H * G, Q, head dim of values]`, float32.
        parts: numbers of all parts, one a row.
    """

    shape: Any
    scale: float
    query: int
    scratch: int
    result: int
    parts: Any


class Part(NamedTuple):
    """
    One of them.

    Attributes:
        mask: address of what is added to the scores, and its four dimensions; no columns mean no mask.
        span: tokens in use, tiles of a task, and runs of tiles, which is how many partial results are written.
        first: the first of them.
        exact: what its tokens are stored as, if it is what `exact.attend_exact` attends to, else 0.
        own: what else it needs.
    """

    mask: Any
    span: Any
    first: int
    exact: int
    own: Any


def head_numbers(
    shape: tuple[int, ...], scale: float, query: int, scratch: int, result: int, num_parts: int, part_size: int
) -> list[int]:
    """What a table has before its parts."""
    return [0, *shape, bits_of(scale), query, scratch, result, num_parts, part_size]


@njit(**OPTIONS)
def call_at(address: int) -> Call:
    """The call of a table at an address."""
    numbers = longs_at(address, (FIRST_PART,))
    shape = (
        numbers[_SHAPE],
        numbers[_SHAPE + 1],
        numbers[_SHAPE + 2],
        numbers[_SHAPE + 3],
        numbers[_SHAPE + 4],
        numbers[_SHAPE + 5],
        numbers[_SHAPE + 6],
    )
    return Call(
        shape,
        doubles_at(address + _LONG * _SCALE, (1,))[0],
        numbers[QUERY],
        numbers[QUERY + 1],
        numbers[QUERY + 2],
        longs_at(address + _LONG * FIRST_PART, (numbers[QUERY + 3], numbers[QUERY + 4])),
    )


@njit(**OPTIONS)
def part_of(task: int, call: Call) -> tuple[int, Part]:
    """The number of a task within its part, and that part."""
    number = 0
    while number + 1 < call.parts.shape[0] and call.parts[number + 1, 0] <= task:
        number += 1
    own = call.parts[number]
    mask = (own[_MASK], own[_MASK + 1], own[_MASK + 2], own[_MASK + 3], own[_MASK + 4])
    span = (own[LENGTH], own[LENGTH + 1], own[LENGTH + 2])
    return task - own[0], Part(mask, span, own[1], own[_EXACT], own[OWN:])
