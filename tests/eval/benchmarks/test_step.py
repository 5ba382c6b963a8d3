"""Decode steps: contexts read or filled in, and every place of a grid."""

from functools import partial

import pytest
import torch

from kvcache_plugins.eval.benchmarks import step


@pytest.mark.parametrize(("options", "context"), [("", 150), ("--read 100", 450)])
def test_every_cache_holds_the_context(rows_of, options, context):
    names = ["dynamic", "gear-4bit", "infinigen"]
    rows = rows_of(f"step --steps 3 --context {context} {options} --cache {' --cache '.join(names)}")
    assert [row["cache"] for row in rows] == names
    assert [row["stats"]["tokens_cached"] for row in rows] == [context + 3] * 3
    assert rows[0]["relative_error"] == 0 < rows[1]["relative_error"] < 1


def test_grid_has_a_row_for_every_combination(monkeypatch, read):
    small = partial(step.make_shape, num_heads=1, groups=3, num_layers=1)
    monkeypatch.setitem(step.SHAPES, "gqa-3", small)
    options = "--shape gqa-3 --cache gear-k4v3 --batch-size 1 --batch-size 2 --context 1 --context 64 --steps 3"
    options += " --num-threads 1 --num-threads 2 --dtype float32 --dtype bfloat16"
    before = torch.get_num_threads()
    content = read("bench", "step", *options.split())
    assert content["benchmark"] == "step"
    keys = ("dtype", "batch_size", "context", "num_threads", "cache")
    places = [tuple(row[key] for key in keys) for row in content["rows"]]
    assert len(places) == len(set(places)) == 2**5
    assert torch.get_num_threads() == before
    assert {row["cache"] for row in content["rows"]} == {"dynamic", "gear-k4v3"}
    for row in content["rows"]:
        assert row["lower_quartile_s"] <= row["median_s"] <= row["upper_quartile_s"]
        assert row["relative_error"] < (1e-5 if row["context"] == 1 else 0.2)


def test_an_unknown_shape_is_refused(assert_refused):
    assert_refused("step --cache dynamic --steps 3 --shape gqa-5", "`shape` has to be one of")


def test_a_text_is_refused_for_a_shape_which_reads_none(assert_refused):
    for line in ("step --cache dynamic --steps 3 --shape mqa", "batching --cache transform --shape mqa"):
        assert_refused(line, "`text_file`")
