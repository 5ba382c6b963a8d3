"""A table comes back as it was saved; one of another model or number of ranks, or a damaged one, is refused."""

import json
import random
from pathlib import Path

import pytest

from kvcache_plugins.files.json_file import write_json_file
from kvcache_plugins.kv_runahead.planner import CostModel, Link, PartitionTable, TableEntry, Timing, resolve_partition
from kvcache_plugins.models.fingerprint import fingerprint


SHORT = TableEntry(length=1000, ratios=(0.6, 0.4), seconds=0.5, measured=True)
LONG = TableEntry(length=2000, ratios=(0.7, 0.3), seconds=1.5, measured=False)


def table_for(model) -> PartitionTable:
    return PartitionTable(
        model=fingerprint(model),
        world_size=2,
        entries=(LONG, SHORT),
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


def test_what_is_saved_is_loaded(model, tmp_path: Path) -> None:
    table = table_for(model)
    assert [entry.length for entry in table.entries] == [1000, 2000]
    table.save(tmp_path / "table.json")
    loaded = PartitionTable.load(tmp_path / "table.json", model, 2)
    assert loaded == table
    assert resolve_partition(loaded, 1500, 2) == (975, 525)
    bare = PartitionTable(model=fingerprint(model), world_size=1, entries=(TableEntry(**ONE),))
    bare.save(tmp_path / "bare.json")
    assert PartitionTable.load(tmp_path / "bare.json", model, 1) == bare


ONE = {"length": 10, "ratios": (1.0,), "seconds": 1.0, "measured": False}


def test_another_model_or_number_of_ranks_is_refused(model, tiny_model, tmp_path: Path) -> None:
    table_for(model).save(tmp_path / "table.json")
    with pytest.raises(ValueError, match="table.json was made for another model"):
        PartitionTable.load(tmp_path / "table.json", tiny_model("llama"), 2)
    with pytest.raises(ValueError, match="table.json was made for 2 ranks, but there are 3"):
        PartitionTable.load(tmp_path / "table.json", model, 3)


def without(document: dict, key: str) -> dict:
    return {name: value for name, value in document.items() if name != key}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text, document: text[:-20], "is no JSON file or is damaged"),
        (lambda text, document: "", "is no JSON file or is damaged"),
        (lambda text, document: "[]", "holds a JSON list, but has to hold an object"),
        (lambda text, document: "{}", "holds format None version None, but only"),
        (
            lambda text, document: {**document, "version": 1},
            "version 1, but only 'kvcache_plugins.kv_runahead' version 2",
        ),
        (lambda text, document: without(document, "cost"), "is damaged: `cost` is missing"),
        (lambda text, document: without(document, "world_size"), "is damaged: .*world_size"),
        (lambda text, document: {**document, "more": 1}, "is damaged: .*more"),
        (lambda text, document: {**document, "world_size": "2"}, "`world_size` has to be an integer from 1"),
        (
            lambda text, document: {**document, "world_size": 1},
            "is damaged: .* cut a context into 2 slices",
        ),
        (lambda text, document: {**document, "entries": []}, "`entries` has to hold one length at least"),
        (lambda text, document: {**document, "entries": None}, "is damaged"),
        (lambda text, document: {**document, "entries": [ONE, ONE]}, "none twice, but got lengths \\[10, 10\\]"),
        (
            lambda text, document: {**document, "link": {**document["link"], "bytes_per_second": 0}},
            "`bytes_per_second` has to be a number",
        ),
        (lambda text, document: {**document, "timings": [{"length": 1}]}, "is damaged: .*prefix` is missing"),
    ],
)
def test_damaged_files_are_refused(model, tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "table.json"
    table_for(model).save(path)
    text = path.read_text(encoding="utf-8")
    damaged = damage(text, json.loads(text))
    if isinstance(damaged, str):
        path.write_text(damaged, encoding="utf-8")
    else:
        # Forged: the checksum is right
        content = {key: value for key, value in damaged.items() if key not in ("format", "version", "checksum")}
        write_json_file(path, damaged["format"], damaged["version"], content)
    with pytest.raises(ValueError, match=message) as error:
        PartitionTable.load(path, model, 2)
    assert str(error.value).startswith(f"`partition`: {path} ")


def test_every_changed_byte_is_noticed(model, tmp_path: Path) -> None:
    """But for what JSON does not care about, where a change is none."""
    path, rng = tmp_path / "table.json", random.Random(0)
    table = table_for(model)
    table.save(path)
    content = path.read_bytes()
    for _ in range(500):
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        try:
            assert PartitionTable.load(path, model, 2) == table
        except ValueError as error:
            assert str(error).startswith(f"`partition`: {path} ")


def test_a_missing_file_and_one_that_is_no_text_are_refused(model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        PartitionTable.load(tmp_path / "none.json", model, 2)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="is no JSON file or is damaged"):
        PartitionTable.load(tmp_path / "bytes.json", model, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "`length` has to be an integer of at least 1 but got 0"),
        ({"length": 2.0}, "`length` has to be an integer"),
        ({"ratios": ()}, "`ratios` has to hold ratios that sum to 1 but got \\[\\]"),
        ({"ratios": (0.5, 0.6)}, "which sum to 1.1"),
        ({"ratios": (1.2, -0.2)}, "`ratios` has to hold ratios in \\(0, 1\\] but got 1.2"),
        ({"ratios": ("1",)}, "`ratios` has to hold ratios in"),
        ({"ratios": (0.5, 0.5), "length": 1}, "more than the 1 tokens of `length`"),
        ({"seconds": 0}, "`seconds` has to be a number above 0 but got 0"),
        ({"seconds": float("inf")}, "`seconds` has to be a number above 0"),
        ({"measured": 1}, "`measured` has to be True or False"),
    ],
)
def test_wrong_entries_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableEntry(**{**ONE, **changes})
