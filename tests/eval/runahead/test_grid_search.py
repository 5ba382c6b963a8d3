"""The paper's grid search: it measures the grid of the paper, and never ends worse than it began."""

from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_plugins.eval.runahead.grid_search import search_partition
from kvcache_plugins.kv_runahead.planner import even


def one_by_one(measure: Callable[[tuple[int, ...]], float]) -> Callable[[Sequence[tuple[int, ...]]], Iterator[float]]:
    return lambda partitions: map(measure, partitions)


def test_search_measures_the_papers_grid() -> None:
    """Figure 6: 96 tokens, boundaries 32 and 64, the first step 8; all of five by five, then a quarter."""
    measured: list[tuple[int, ...]] = []

    def distance(lengths: tuple[int, ...]) -> float:
        measured.append(lengths)
        return abs(lengths[0] - 28) + abs(lengths[0] + lengths[1] - 70)

    assert search_partition(even(96, 3), one_by_one(distance)) == ((28, 42, 26), 0)
    assert measured[0] == (32, 32, 32)
    first_level = {(32 + 8 * i, 64 + 8 * j) for i in range(-2, 3) for j in range(-2, 3)}
    assert {(each[0], each[0] + each[1]) for each in measured[:24]} <= first_level
    assert len(set(measured)) == len(measured) <= 25 + 4 * 24
    assert all(sum(each) == 96 and min(each) >= 1 for each in measured)
    # An optimum further away than a level reaches, as over slow links
    assert search_partition(even(1024, 2), one_by_one(lambda lengths: abs(lengths[0] - 60))) == ((60, 964), 0)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 6))
def test_search_is_never_worse_than_its_start(data: st.DataObject, num_ranks: int) -> None:
    """Measures a random number for each partition."""
    start = tuple(data.draw(st.lists(st.integers(1, 40), min_size=num_ranks, max_size=num_ranks)))
    seconds: dict[tuple[int, ...], float] = {}
    random = data.draw(st.randoms(use_true_random=False))

    def measure(lengths: tuple[int, ...]) -> float:
        assert lengths not in seconds
        return seconds.setdefault(lengths, random.random())

    found, least = search_partition(start, one_by_one(measure))
    assert start in seconds and seconds[found] == least == min(seconds.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": (100, 0)}, "`start` has to hold integers of at least 1"),
        ({"first_step": 0}, "`first_step` has to be an integer of at least 1 but got 0"),
        ({"last_step": 0}, "`last_step` has to be an integer of at least 1 but got 0"),
        (
            {"measure": one_by_one(lambda lengths: float("nan"))},
            "`measure` has to return seconds but returned NaN for \\[50, 50",
        ),
    ],
)
def test_invalid_searches_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search_partition(**{"start": (50, 50), "measure": one_by_one(lambda lengths: 1.0), **options})
