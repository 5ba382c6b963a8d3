"""The planner: a cost model that fits what follows its formula, partitions that sum up, and the paper's where its
timings are used. A table comes back as it was saved; one of another model or number of ranks, or a damaged one, is
refused.
"""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvcache_plugins.files.records import write_json
from kvcache_plugins.kv_runahead.planner import (
    RECTANGLE,
    TRIANGLE,
    CostModel,
    Link,
    PartitionTable,
    TableEntry,
    Timing,
    bytes_of_token,
    planned,
    predicted,
    resolve_partition,
)
from kvcache_plugins.models.fingerprint import fingerprint


COST = CostModel(fixed=0.01, per_token=1e-4, per_pair=2e-8, triangle=0.6, projection_share=0.2)
SLICES = [(256, 0), (1024, 0), (4096, 0), (512, 512), (1024, 3072), (300, 9000)]
# The paper's Llama 7B: timings of one A100, 32 layers, float16 keys and values of 4096 channels
PAPER = CostModel(per_token=0.317 / 4096, per_pair=0.333 / 4096**2, triangle=RECTANGLE)
COSTS = st.builds(
    CostModel,
    fixed=st.sampled_from([0.0, 0.05]),
    per_token=st.floats(1e-6, 1e-3),
    per_pair=st.one_of(st.just(0.0), st.floats(1e-10, 1e-6)),
    triangle=st.sampled_from([0.5, 1.0]),
)
ONE = {"length": 10, "ratios": (1.0,), "seconds": 1.0, "measured": False}


def timings_of(cost: CostModel, slices: list[tuple[int, int]], noise: float = 0.0) -> list[Timing]:
    rng = np.random.default_rng(0)
    return [
        Timing(length=length, prefix=prefix, seconds=cost.seconds(length, prefix) * rng.uniform(1 - noise, 1 + noise))
        for length, prefix in slices
    ]


def ratios(lengths: Sequence[int]) -> list[float]:
    return [length / sum(lengths) for length in lengths]


def table_of(by_length: dict[int, Sequence[float]], world_size: int) -> PartitionTable:
    entries = tuple(
        TableEntry(length=length, ratios=tuple(each), seconds=1.0, measured=True) for length, each in by_length.items()
    )
    return PartitionTable(model="", world_size=world_size, entries=entries)


# Cost


@pytest.mark.parametrize(
    ("cost", "slices", "triangle"),
    [
        (COST, SLICES, None),
        (COST, SLICES, 0.6),
        (COST, SLICES[:3], 0.6),
        # The paper's two timings of one process; measured again, they are no more than two
        (PAPER, [(8192, 0), (16384, 0)], RECTANGLE),
        (PAPER, [(8192, 0), (16384, 0)] * 3, RECTANGLE),
    ],
)
def test_fit_recovers_the_model_of_timings(cost: CostModel, slices, triangle: float | None) -> None:
    fitted = CostModel.fit(timings_of(cost, slices), triangle=triangle)
    for name in ("fixed", "per_token", "per_pair", "triangle"):
        assert getattr(fitted, name) == pytest.approx(getattr(cost, name), rel=1e-6, abs=1e-15), name


def test_fit_bears_noise_and_has_no_negative_part() -> None:
    fitted = CostModel.fit(timings_of(COST, SLICES * 3, noise=0.02))
    for length, prefix in [*SLICES, (2048, 2048)]:
        assert fitted.seconds(length, prefix) == pytest.approx(COST.seconds(length, prefix), rel=0.03)
    # Seconds that grow more slowly than lengths: no attention shows
    slow = [Timing(length=length, seconds=seconds) for length, seconds in ((100, 1.0), (200, 1.5), (400, 2.3))]
    fitted = CostModel.fit(slow, triangle=TRIANGLE)
    assert fitted.per_pair == 0 and fitted.per_token > 0 and fitted.fixed > 0


SAME = [Timing(length=length, prefix=prefix, seconds=1.0) for length, prefix in SLICES]


@pytest.mark.parametrize(
    ("timings", "triangle", "message"),
    [
        ([], 1.0, "slices of two lengths at least, but got \\[\\]"),
        (timings_of(COST, [(64, 0), (64, 64)]), 1.0, "slices of two lengths at least"),
        (SAME, 0.5, "do not grow with the length"),
        (SAME, None, "do not grow with the length"),
    ],
)
def test_timings_that_determine_no_model_are_refused(timings, triangle: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.fit(timings, triangle=triangle)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Timing, {"length": 0, "seconds": 1.0}, "`length` has to be an integer of at least 1 but got 0"),
        (Timing, {"length": 1, "prefix": -1, "seconds": 1.0}, "`prefix` has to be an integer of at least 0"),
        (Timing, {"length": 1, "seconds": 0.0}, "`seconds` has to be a number above 0 but got 0.0"),
        (Timing, {"length": 1, "seconds": float("nan")}, "`seconds` has to be a number"),
        (Link, {"bytes_per_second": 0}, "`bytes_per_second` has to be a number above 0"),
        (Link, {"latency": -1.0, "bytes_per_second": 1}, "`latency` has to be a number of at least 0"),
        (Link, {"bytes_per_second": 1, "shared": 1}, "`shared` has to be True or False"),
        (CostModel, {"per_token": 0.0, "per_pair": 0.0}, "one of `per_token` and `per_pair` has to be above 0"),
        (CostModel, {"per_token": -1.0, "per_pair": 0.0}, "`per_token` has to be a number of at least 0"),
        (CostModel, {"per_token": 1.0, "per_pair": 0.0, "triangle": 0.0}, "`triangle` has to be a number above 0"),
        (CostModel, {"per_token": 1.0, "per_pair": 0.0, "projection_share": 2.0}, "`projection_share` has to be"),
        (TableEntry, {**ONE, **{"length": 0}}, "`length` has to be an integer of at least 1 but got 0"),
        (TableEntry, {**ONE, **{"length": 2.0}}, "`length` has to be an integer"),
        (TableEntry, {**ONE, **{"ratios": ()}}, "`ratios` has to hold ratios that sum to 1 but got \\[\\]"),
        (TableEntry, {**ONE, **{"ratios": (0.5, 0.6)}}, "which sum to 1.1"),
        (TableEntry, {**ONE, **{"ratios": (1.2, -0.2)}}, "`ratios` has to hold ratios in \\(0, 1\\] but got 1.2"),
        (TableEntry, {**ONE, **{"ratios": ("1",)}}, "`ratios` has to hold ratios in"),
        (TableEntry, {**ONE, **{"ratios": (0.5, 0.5), "length": 1}}, "more than the 1 tokens of `length`"),
        (TableEntry, {**ONE, **{"seconds": 0}}, "`seconds` has to be a number above 0 but got 0"),
        (TableEntry, {**ONE, **{"seconds": float("inf")}}, "`seconds` has to be a number above 0"),
        (TableEntry, {**ONE, **{"measured": 1}}, "`measured` has to be True or False"),
    ],
)
def test_invalid_fields_are_refused(kind, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_shapes_count_operations(tiny_model) -> None:
    model = tiny_model("llama")
    cost = CostModel.of_shapes(model)
    # Two layers: queries and output 128 x 128, keys and values 128 x 64, MLP 3 x 128 x 256
    weights = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    assert cost.per_token == 2 * weights
    # Two layers, four heads, 32 channels, of a key and of a value, a multiplication and an addition
    assert cost.per_pair == 2 * 4 * 32 * 2 * 2
    assert cost.projection_share == pytest.approx(2 * 128 * 256 / weights)
    assert (cost.fixed, cost.triangle) == (0.0, TRIANGLE)
    assert CostModel.of_shapes(model.config) == cost
    assert bytes_of_token(model, torch.float32) == 2 * bytes_of_token(model.config, torch.bfloat16) == 2 * 2 * 32 * 4


def test_shapes_of_other_architectures_are_read(tiny_model) -> None:
    """A window costs by token, not by pair; GPT-2's layers are no `Linear`; of experts those count that are used."""
    hybrid = CostModel.of_shapes(tiny_model("gemma3-hybrid"))
    full = CostModel.of_shapes(tiny_model("gemma3-hybrid", layer_types=["full_attention"] * 4))
    attention = 4 * 4 * 32
    assert (hybrid.per_pair, full.per_pair) == (2 * attention, 4 * attention)
    assert hybrid.per_token - full.per_token == 2 * attention * 32
    assert CostModel.of_shapes(tiny_model("gpt2")).per_token == 2 * 2 * 12 * 128 * 128
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 6}
    one, three = (
        CostModel.of_shapes(CONFIG_MAPPING["mixtral"](**sizes, num_experts_per_tok=count)) for count in (1, 3)
    )
    assert three.per_token - one.per_token == 2 * 2 * 3 * 32 * 48


# Partitions


def test_planned_is_near_the_papers_searched() -> None:
    """The paper found 0.594, and (interpolated) 0.350, 0.255, 0.210, 0.185, by running models."""
    two = planned(16384, 2, PAPER)
    assert ratios(two) == pytest.approx([0.597, 0.403], abs=1e-3) and abs(two[0] - 9728) <= 64
    four = planned(10240, 4, PAPER)
    assert ratios(four) == pytest.approx([0.348, 0.257, 0.212, 0.183], abs=1e-3)
    assert ratios(four) == pytest.approx([0.350, 0.255, 0.210, 0.185], abs=3e-3)
    # Kernels that skip the triangle want a longer first slice
    skipping = CostModel(per_token=PAPER.per_token, per_pair=PAPER.per_pair, triangle=0.5)
    assert planned(16384, 2, skipping)[0] > two[0]


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


def test_table_interpolates_ratios() -> None:
    table = table_of({8000: (0.4, 0.6), 12000: (0.5, 0.5), 16000: (1.0,)}, 2)
    expected = {8000: (3200, 4800), 9000: (3825, 5175), 12000: (6000, 6000)}
    # Outside, and between partitions of different numbers of slices, the nearest counts
    expected |= {1000: (400, 600), 50_000: (50_000,), 13_000: (6500, 6500), 15_000: (15_000,), 2: (1, 1)}
    assert {length: predicted(length, table) for length in expected} == expected
    with pytest.raises(ValueError, match="the context has 1 tokens, but each of 2 ranks needs one"):
        predicted(1, table)


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    length=st.integers(12, 10_000),
    other=st.integers(12, 10_000),
)
def test_ratios_of_any_size_leave_no_slice_empty(weights: list[int], length: int, other: int) -> None:
    lengths = predicted(length, table_of({other: ratios(weights)}, len(weights)))
    assert sum(lengths) == length and min(lengths) >= 1
    assert resolve_partition(tuple(ratios(weights)), length, len(weights)) == lengths


def test_partitions_of_a_user_are_resolved(tiny_model) -> None:
    model = tiny_model("llama")
    by_shapes = resolve_partition(None, 100, 2, model=model)
    assert by_shapes == planned(100, 2, CostModel.of_shapes(model.config)) != (50, 50)
    assert resolve_partition("planned", 100, 2, model=model.config) == by_shapes
    assert resolve_partition("even", 100, 3) == (34, 33, 33)
    # Fewer slices than ranks leave ranks without work
    assert resolve_partition((60, 40), 100, 2) == resolve_partition([60, 40], 100, 3) == (60, 40)
    assert resolve_partition((0.6, 0.4), 100, 2) == (60, 40)
    assert resolve_partition((0.333, 0.333, 0.333), 9000, 3) == (3000, 3000, 3000)
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
        ("even", {"length": 1}, "the context has 1 tokens, but each of 2 ranks needs one at least: use fewer ranks"),
        ("even", {"num_ranks": 0}, "`num_ranks` has to be an integer of at least 1 but got 0"),
    ],
)
def test_invalid_partitions_are_refused(partition, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_partition(partition, **{"length": 100, "num_ranks": 2, **options})


# Tables


def table_for(model) -> PartitionTable:
    return PartitionTable(
        model=fingerprint(model),
        world_size=2,
        entries=(
            TableEntry(length=2000, ratios=(0.7, 0.3), seconds=1.5, measured=False),
            TableEntry(length=1000, ratios=(0.6, 0.4), seconds=0.5, measured=True),
        ),
        timings=(Timing(length=1000, seconds=0.7), Timing(length=500, prefix=500, seconds=0.4)),
        cost=CostModel(per_token=1e-4, per_pair=1e-8, triangle=0.5),
        link=Link(latency=1e-5, bytes_per_second=2e9),
        machine="x86_64 CPU, 1 thread a rank",
        date="2025-01-01T00:00:00+00:00",
        versions={"torch": "2.9"},
    )


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=1)


@pytest.fixture
def path(model, tmp_path: Path) -> Path:
    table_for(model).save(tmp_path / "table.json")
    return tmp_path / "table.json"


def test_a_saved_table_is_loaded(model, tiny_model, path: Path) -> None:
    loaded = PartitionTable.load(path, model, 2)
    assert loaded == table_for(model) and [entry.length for entry in loaded.entries] == [1000, 2000]
    assert resolve_partition(loaded, 1500, 2) == (975, 525)
    with pytest.raises(ValueError, match="table.json was made for another model"):
        PartitionTable.load(path, tiny_model("llama"), 2)
    with pytest.raises(ValueError, match="table.json was made for 2 ranks, but there are 3"):
        PartitionTable.load(path, model, 3)
    bare = PartitionTable(model=fingerprint(model), world_size=1, entries=(TableEntry(**ONE),))
    bare.save(path)
    assert PartitionTable.load(path, model, 1) == bare


# Content that replaces the table: bytes, or changed fields, `None` for a missing one
DAMAGES = [
    (b"", "is no JSON file or is damaged"),
    (b"\xff\xfe\x00\x80", "is no JSON file or is damaged"),
    (b"[]", "is damaged: the JSON has to be an object but is a list"),
    (b"{}", "holds format None version None, but only"),
    ({"version": 1}, "version 1, but only 'kvcache_plugins.kv_runahead' version 2"),
    ({"world_size": None}, "is damaged: .*world_size"),
    ({"more": 1}, "is damaged: .*more"),
    ({"world_size": "2"}, "`world_size` has to be an integer from 0"),
    ({"world_size": 1}, "is damaged: .* cut a context into 2 slices"),
    ({"entries": []}, "`entries` has to hold one length at least"),
    ({"entries": 1}, "is damaged"),
    ({"entries": [ONE, ONE]}, "none twice, but got lengths \\[10, 10\\]"),
    ({"link": {"latency": 0, "bytes_per_second": 0, "shared": False}}, "`bytes_per_second` has to be a number"),
    ({"timings": [{"length": 1}]}, "is damaged: .*prefix` is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_files_are_refused(model, path: Path, damage, message: str) -> None:
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        # Forged: the checksum is right
        content = {**json.loads(path.read_text(encoding="utf-8")), **damage, "checksum": None}
        write_json(path, {key: value for key, value in content.items() if value is not None})
    with pytest.raises(ValueError, match=message) as error:
        PartitionTable.load(path, model, 2)
    assert str(error.value).startswith(f"`partition`: {path} ")


def test_every_changed_byte_is_detected(model, path: Path) -> None:
    """But for what JSON does not care about, where a change is none."""
    rng, content = random.Random(0), path.read_bytes()
    for _ in range(100):
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        try:
            assert PartitionTable.load(path, model, 2) == table_for(model)
        except ValueError as error:
            assert str(error).startswith(f"`partition`: {path} ")
