"""What compiled attention is shared out in: tasks, each a run of tiles of one key/value head and up to four queries.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, D head dim.
"""

from typing import Any, NamedTuple

from numba import njit

from .arrays import floats_at
from .primitives import BORROWING, OPTIONS
from .row_vectors import ROWS


class Task(NamedTuple):
    """
    A task's item and head, both also as the number of a matrix; its first query of that head's `G Q`, and how many of
    them; and the number of its run of tiles.
    """

    batch: int
    head: int
    matrix: int
    row: int
    rows: int
    part: int


def most_rows(num_rows: int) -> int:
    """
    Queries of a task at most, where a head has some: as even as tasks of up to four can be. Workers are compiled for
    every such number.
    """
    return -(-num_rows // -(-num_rows // ROWS))


@njit(**BORROWING)
def task_of(number: int, shape: Any, span: Any) -> Task:
    """
    One of the tasks of a part.

    Args:
        number: which one.
        shape: B, H, G, Q, and more.
        span: tokens in use, tiles of a task, and runs of tiles.
    """
    num_rows = shape[2] * shape[3]
    row_blocks = -(-num_rows // ROWS)
    most = -(-num_rows // row_blocks)
    item, part = number // span[2], number % span[2]
    matrix, row = item // row_blocks, item % row_blocks * most
    return Task(matrix // shape[1], matrix % shape[1], matrix, row, min(most, num_rows - row), part)


@njit(**OPTIONS)
def queries_of(task: Task, shape: Any, query: int) -> Any:
    """A task's queries `[rows, D]`, of `[B, H * G, Q, D]` at an address."""
    queries = floats_at(query, (shape[0] * shape[1], shape[2] * shape[3], shape[4]))
    return queries[task.matrix, task.row : task.row + task.rows]
