"""A table comes back as it was saved; one of another model or number of ranks, or a damaged one, is refused."""

import json
import random
from pathlib import Path

import pytest

from kvcache_plugins.files.records import write_json
from kvcache_plugins.kv_runahead.planner import CostModel, Link, PartitionTable, TableEntry, Timing, resolve_partition
from kvcache_plugins.models.fingerprint import fingerprint


ONE = {"length": 10, "ratios": (1.0,), "seconds": 1.0, "measured": False}


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


def test_what_is_saved_is_loaded(model, tiny_model, path: Path) -> None:
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


# What is written in the place of the table: bytes, or changed fields, `None` for one that is left out
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


def test_every_changed_byte_is_noticed(model, path: Path) -> None:
    """But for what JSON does not care about, where a change is none."""
    rng, content = random.Random(0), path.read_bytes()
    for _ in range(500):
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        try:
            assert PartitionTable.load(path, model, 2) == table_for(model)
        except ValueError as error:
            assert str(error).startswith(f"`partition`: {path} ")
    path.unlink()
    with pytest.raises(ValueError, match="there is no file"):
        PartitionTable.load(path, model, 2)


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
