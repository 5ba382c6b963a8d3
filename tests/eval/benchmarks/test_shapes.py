"""`bench shapes`: every place of the table has its rows, checked before they are timed."""

import json

import pytest

from kvcache_plugins.console.results import with_results
from kvcache_plugins.eval.benchmarks import shapes
from kvcache_plugins.eval.benchmarks.shapes import benchmark_shapes


command = with_results(benchmark_shapes)


OPTIONS = {
    "part": ["step", "attention"],
    "cache": ["gear-k4v3"],
    "shape": ["gqa-3"],
    "dtype": ["float32"],
    "batch_size": [1, 2],
    "num_threads": [1],
    "context": [1, 64],
    "rounds": 3,
    "seconds": 0,
    "max_gigabytes": 1,
    "limit": 3600,
}


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "gqa-3", shapes.Heads(num_heads=1, groups=3, num_layers=1))


def test_rows_of_every_place(tmp_path):
    command(**OPTIONS, out=tmp_path / "shapes.json")
    content = json.loads((tmp_path / "shapes.json").read_text(encoding="utf-8"))
    places = [(row["part"], row["batch_size"], row["context"], row["cache"]) for row in content["rows"]]
    steps = [
        ("step", size, length, name) for size in (1, 2) for length in (1, 64) for name in ("dynamic", "gear-k4v3")
    ]
    # One token is no group, and attention alone is over what is compressed
    attention = [("attention", size, 64, name) for size in (1, 2) for name in ("dense float32", "gear-k4v3")]
    assert sorted(places) == sorted(steps + attention)
    assert content["failures"] == []
    for row in content["rows"]:
        assert row["lower_quartile_s"] <= row["median_s"] <= row["upper_quartile_s"]
        assert row["relative_error"] < 0.2
    # One token is held exact by both
    assert next(row for row in content["rows"] if row["cache"] == "gear-k4v3")["relative_error"] < 1e-5


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    command(**{**OPTIONS, "part": ["step"], "max_gigabytes": 1e-5}, out=tmp_path / "shapes.json")
    content = json.loads((tmp_path / "shapes.json").read_text(encoding="utf-8"))
    assert {row["context"] for row in content["rows"]} == {1}
    assert [each["what"] for each in content["failures"]] == [
        "gqa-3 float32, batch 1, 64 tokens",
        "gqa-3 float32, batch 2, 64 tokens",
    ]


def test_without_time_left_every_place_is_named(tmp_path):
    command(**{**OPTIONS, "limit": 0}, out=tmp_path / "shapes.json")
    content = json.loads((tmp_path / "shapes.json").read_text(encoding="utf-8"))
    assert content["rows"] == [] and len(content["failures"]) == 4


@pytest.mark.parametrize(("option", "value"), [("part", "kernel"), ("shape", "gqa-5"), ("dtype", "int4")])
def test_wrong_names_are_refused(option, value):
    with pytest.raises(ValueError, match=f"`{option}` (must|has to) be one of"):
        command(**{**OPTIONS, option: [value]})
