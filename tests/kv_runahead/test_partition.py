"""Partitions sum up, are the paper's where its timings are used, and are never worse than what they began with."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_plugins.kv_runahead.planner import (
    RECTANGLE,
    CostModel,
    Link,
    PartitionTable,
    TableEntry,
    even,
    planned,
    predict_ttft,
    predicted,
    resolve_partition,
    searched,
)


# The paper's Llama 7B: timings of one A100, 32 layers, float16 keys and values of 4096 channels
PAPER = CostModel(per_token=0.317 / 4096, per_pair=0.333 / 4096**2, triangle=RECTANGLE)
SIZES = {"bytes_per_token": 2 * 2 * 4096, "num_layers": 32}
FAST, SLOW, POOR = (Link(bytes_per_second=speed) for speed in (300e9, 10e9, 1e9))
COSTS = st.builds(
    CostModel,
    fixed=st.sampled_from([0.0, 0.05]),
    per_token=st.floats(1e-6, 1e-3),
    per_pair=st.one_of(st.just(0.0), st.floats(1e-10, 1e-6)),
    triangle=st.sampled_from([0.5, 1.0]),
)
LINKS = st.builds(Link, latency=st.floats(0, 1e-3), bytes_per_second=st.floats(1e7, 1e12), shared=st.booleans())


def ttft(lengths: Sequence[int], link: Link = FAST, cost: CostModel = PAPER) -> float:
    return predict_ttft(lengths, cost, link, **SIZES)


def ratios(lengths: Sequence[int]) -> list[float]:
    return [length / sum(lengths) for length in lengths]


def table_of(by_length: dict[int, Sequence[float]], world_size: int) -> PartitionTable:
    entries = tuple(
        TableEntry(length=length, ratios=tuple(each), seconds=1.0, measured=True) for length, each in by_length.items()
    )
    return PartitionTable(model="", world_size=world_size, entries=entries)


@pytest.mark.parametrize("link", [None, FAST], ids=["closed form", "refined at 300 GB/s"])
def test_planned_is_near_the_papers_searched(link: Link | None) -> None:
    """The paper found 0.594, and (interpolated) 0.350, 0.255, 0.210, 0.185, by running models."""
    sizes = SIZES if link else {}
    two = planned(16384, 2, PAPER, link=link, **sizes)
    assert ratios(two) == pytest.approx([0.597, 0.403], abs=1e-3)
    assert abs(two[0] - 9728) <= 64
    four = planned(10240, 4, PAPER, link=link, **sizes)
    assert ratios(four) == pytest.approx([0.348, 0.257, 0.212, 0.183], abs=1e-3)
    assert ratios(four) == pytest.approx([0.350, 0.255, 0.210, 0.185], abs=3e-3)


def test_skipped_triangle_makes_the_first_slice_longer() -> None:
    skipping = CostModel(per_token=PAPER.per_token, per_pair=PAPER.per_pair, triangle=0.5)
    assert planned(16384, 2, skipping)[0] > planned(16384, 2, PAPER)[0]


@given(length=st.integers(1, 10**6), num_ranks=st.integers(1, 64))
def test_even_slices_differ_by_a_token(length: int, num_ranks: int) -> None:
    if length < num_ranks:
        with pytest.raises(ValueError, match="each of .* ranks needs one at least"):
            even(length, num_ranks)
        return
    lengths = even(length, num_ranks)
    assert (len(lengths), sum(lengths)) == (num_ranks, length)
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=50, deadline=None)
@given(cost=COSTS, length=st.integers(64, 100_000), num_ranks=st.integers(1, 16))
def test_planned_gives_every_rank_the_same_time(cost: CostModel, length: int, num_ranks: int) -> None:
    lengths = planned(length, num_ranks, cost)
    assert (len(lengths), sum(lengths)) == (num_ranks, length)
    ends = list(itertools.accumulate(lengths))
    times = [cost.seconds(each, end - each) for each, end in zip(lengths, ends, strict=True) if each > 1]
    # Both boundaries of a slice are rounded; a last token costs most
    token = cost.seconds(2, length) - cost.seconds(1, length)
    assert max(times) - min(times) <= 4 * token + 1e-9 * max(times)
    # With a prefix a token costs more
    assert all(first >= second - 2 for first, second in itertools.pairwise(lengths))


@settings(max_examples=20, deadline=None)
@given(cost=COSTS, link=LINKS, length=st.integers(64, 50_000), num_ranks=st.integers(1, 6))
def test_planned_with_a_link_beats_simple_choices(cost: CostModel, link: Link, length: int, num_ranks: int) -> None:
    lengths = planned(length, num_ranks, cost, link=link, **SIZES)
    assert sum(lengths) == length
    assert min(lengths) >= 1
    assert len(lengths) <= num_ranks
    # A per cent more is allowed for a rank less, and half of one for what the search does not try
    worth = 1.015 * ttft(lengths, link, cost) ** -1
    for other in ((length,), even(length, num_ranks), planned(length, num_ranks, cost)):
        assert ttft(other, link, cost) * worth >= 1
    full = planned(length, num_ranks, cost, link=link, **SIZES, allow_fewer=False)
    assert (len(full), sum(full)) == (num_ranks, length)


def test_slow_links_use_fewer_ranks() -> None:
    """The paper's table 3: the slower the link and the shorter the context, the less there is to gain."""
    counts = {link: len(planned(16384, 8, PAPER, link=link, **SIZES)) for link in (FAST, SLOW, POOR)}
    assert counts[FAST] == 8 > counts[SLOW] > counts[POOR] == 2
    fewer = planned(16384, 8, PAPER, link=POOR, **SIZES)
    every = planned(16384, 8, PAPER, link=POOR, **SIZES, allow_fewer=False)
    assert ttft(fewer, POOR) <= 1.01 * ttft(every, POOR)
    assert ttft(fewer, POOR) < 0.5 * ttft(planned(16384, 8, PAPER), POOR)
    # Boundaries move left, so that less is sent
    assert fewer[0] < planned(16384, 2, PAPER)[0]
    very_poor = Link(latency=0.1, bytes_per_second=1e8)
    assert planned(4096, 4, PAPER, link=very_poor, **SIZES) == (4096,)


def test_a_link_needs_sizes() -> None:
    with pytest.raises(ValueError, match="`link` needs `bytes_per_token` and `num_layers`"):
        planned(100, 2, PAPER, link=FAST)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("link", [FAST, SLOW, POOR], ids=["300 GB/s", "10 GB/s", "1 GB/s"])
def test_planned_is_as_good_as_searched(num_ranks: int, link: Link) -> None:
    found = searched(16384, num_ranks, lambda lengths: ttft(lengths, link))
    assert ttft(planned(16384, num_ranks, PAPER, link=link, **SIZES), link) <= 1.011 * ttft(found, link)


@pytest.mark.parametrize(("length", "num_ranks"), [(10240, 2), (10240, 4), (14336, 3)])
def test_interpolated_is_near_searched(length: int, num_ranks: int) -> None:
    """Entries every 4k, as in the paper, which found 1.3 %."""
    below, above = (length // 4096 * 4096, (length // 4096 + 1) * 4096)
    found = {each: searched(each, num_ranks, ttft) for each in (below, above, length)}
    table = table_of({each: ratios(found[each]) for each in (below, above)}, num_ranks)
    assert ttft(predicted(length, table)) <= 1.02 * ttft(found[length])


def test_search_measures_the_papers_grid() -> None:
    """Figure 6: 96 tokens, boundaries 32 and 64, the first step 8; all of five by five, then a quarter."""
    measured: list[tuple[int, ...]] = []

    def distance(lengths: tuple[int, ...]) -> float:
        measured.append(lengths)
        return abs(lengths[0] - 28) + abs(lengths[0] + lengths[1] - 70)

    assert searched(96, 3, distance) == (28, 42, 26)
    assert measured[0] == (32, 32, 32)
    first_level = {(32 + 8 * i, 64 + 8 * j) for i in range(-2, 3) for j in range(-2, 3)}
    assert {(each[0], each[0] + each[1]) for each in measured[:24]} <= first_level
    assert len(set(measured)) == len(measured) <= 25 + 4 * 24
    assert all(sum(each) == 96 and min(each) >= 1 for each in measured)


def test_search_follows_its_rim() -> None:
    """An optimum further away than a level reaches, as over slow links."""
    assert searched(1024, 2, lambda lengths: abs(lengths[0] - 60)) == (60, 964)


def test_search_of_many_ranks_moves_two_boundaries_at_a_time() -> None:
    calls = 0

    def measure(lengths: tuple[int, ...]) -> float:
        nonlocal calls
        calls += 1
        return ttft(lengths)

    found = searched(16384, 8, measure)
    assert ttft(found) <= 1.02 * ttft(planned(16384, 8, PAPER))
    # The whole grid has 78125 in each level
    assert calls < 1000


@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 6))
def test_search_is_never_worse_than_its_start(data: st.DataObject, num_ranks: int) -> None:
    """Whatever it measures: here a random number for each partition."""
    start = tuple(data.draw(st.lists(st.integers(1, 40), min_size=num_ranks, max_size=num_ranks)))
    seconds: dict[tuple[int, ...], float] = {}
    random = data.draw(st.randoms(use_true_random=False))

    def measure(lengths: tuple[int, ...]) -> float:
        assert lengths not in seconds
        return seconds.setdefault(lengths, random.random())

    found = searched(sum(start), num_ranks, measure, start=start)
    assert start in seconds
    assert seconds[found] == min(seconds.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": (50, 51)}, "`start` has to sum to the context's 100 tokens but got \\[50, 51\\], 101"),
        ({"start": (100,)}, "`start` has to have a slice for each of 2 ranks"),
        ({"start": (100, 0)}, "`start` has to hold integers of at least 1"),
        ({"first_step": 0}, "`first_step` has to be an integer of at least 1 but got 0"),
        (
            {"measure": lambda lengths: float("nan")},
            "`measure` has to return seconds but returned NaN for \\[50, 50\\]",
        ),
    ],
)
def test_wrong_searches_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        searched(100, 2, **{"measure": lambda lengths: 1.0, **options})


def test_table_interpolates_ratios() -> None:
    table = table_of({8000: (0.4, 0.6), 12000: (0.5, 0.5), 16000: (1.0,)}, 2)
    assert predicted(8000, table) == (3200, 4800)
    assert predicted(9000, table) == (3825, 5175)
    assert predicted(12000, table) == (6000, 6000)
    # Outside, and between partitions of different numbers of slices, the nearest counts
    assert predicted(1000, table) == (400, 600)
    assert predicted(50_000, table) == (50_000,)
    assert predicted(13_000, table) == (6500, 6500)
    assert predicted(15_000, table) == (15_000,)
    assert predicted(2, table) == (1, 1)
    with pytest.raises(ValueError, match="the context has 1 tokens, but each of 2 ranks needs one"):
        predicted(1, table)


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    length=st.integers(12, 10_000),
    other=st.integers(12, 10_000),
)
def test_ratios_of_any_size_leave_no_slice_empty(weights: list[int], length: int, other: int) -> None:
    table = table_of({other: ratios(weights)}, len(weights))
    lengths = predicted(length, table)
    assert sum(lengths) == length
    assert min(lengths) >= 1
    assert resolve_partition(tuple(ratios(weights)), length, len(weights)) == lengths


def test_resolves_what_a_user_gives(tiny_model) -> None:
    model = tiny_model("llama")
    by_shapes = resolve_partition(None, 100, 2, model=model)
    assert by_shapes == planned(100, 2, CostModel.of_shapes(model.config)) != (50, 50)
    assert resolve_partition("planned", 100, 2, model=model.config) == by_shapes
    assert resolve_partition("even", 100, 3) == (34, 33, 33)
    assert resolve_partition((60, 40), 100, 2) == (60, 40)
    # Fewer slices than ranks leave ranks without work
    assert resolve_partition([60, 40], 100, 3) == (60, 40)
    assert resolve_partition((0.6, 0.4), 100, 2) == (60, 40)
    assert resolve_partition((0.333, 0.333, 0.333), 9, 3) == (3, 3, 3)
    assert resolve_partition(table_of({10: (0.3, 0.7)}, 2), 100, 2) == (30, 70)


@pytest.mark.parametrize(
    ("partition", "options", "message"),
    [
        ("uneven", {}, "`partition` has to be one of \\['even', 'planned'\\], slice lengths, ratios or a"),
        (7, {}, "`partition` has to be one of"),
        ((), {}, "`partition` has to hold integers of at least 1, or ratios as floats, but got \\[\\]"),
        ((50, 51), {}, "`partition` has to sum to the context's 100 tokens but got \\[50, 51\\], 101"),
        ((100, 0), {}, "`partition` has to hold integers of at least 1"),
        ((True, 99), {}, "`partition` has to hold integers of at least 1"),
        ((50, 0.5), {}, "`partition` has to hold integers of at least 1"),
        ((50, 25, 25), {}, "`partition` has 3 slices, but there are 2 ranks"),
        ((0.5, 0.4), {}, "`partition` has to hold ratios that sum to 1 but got \\[0.5, 0.4\\], which sum to 0.9"),
        ((1.0, 0.0), {}, "`partition` has to hold ratios in \\(0, 1\\] but got 0.0"),
        ((1.5, -0.5), {}, "`partition` has to hold ratios in"),
        (table_of({100: (0.5, 0.3, 0.2)}, 3), {}, "`partition` is a table for 3 ranks, but there are 2"),
        (None, {}, "`partition` is to be planned, for which `model` is needed"),
        ("even", {"length": 1}, "the context has 1 tokens, but each of 2 ranks needs one at least"),
        ("even", {"num_ranks": 0}, "`num_ranks` has to be an integer of at least 1 but got 0"),
    ],
)
def test_what_fits_nothing_is_refused(partition, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_partition(partition, **{"length": 100, "num_ranks": 2, **options})
