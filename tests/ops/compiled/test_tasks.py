"""Queries shared out in tasks: every one in one task, and none has more than a worker is compiled for."""

import pytest

from kvcache_plugins.ops.compiled.row_vectors import ROWS
from kvcache_plugins.ops.compiled.tasks import most_rows, task_of


@pytest.mark.parametrize("groups", [1, 3, 4, 5, 6, 9, 21])
@pytest.mark.parametrize("num_queries", [1, 7])
def test_every_query_is_in_one_task(groups, num_queries) -> None:
    num_rows, shape, span = groups * num_queries, (1, 2, groups, num_queries), (100, 1, 3)
    num_blocks = -(-num_rows // ROWS)
    seen = []
    for number in range(shape[1] * num_blocks * span[2]):
        task = task_of.py_func(number, shape, span)
        assert 1 <= task.rows <= most_rows(num_rows) <= ROWS
        seen += [(task.head, task.part, row) for row in range(task.row, task.row + task.rows)]
    assert sorted(seen) == [(head, part, row) for head in range(2) for part in range(3) for row in range(num_rows)]


def test_tasks_are_even() -> None:
    assert [most_rows(num_rows) for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)] == [1, 2, 3, 4, 3, 3, 4, 4, 3, 4]
