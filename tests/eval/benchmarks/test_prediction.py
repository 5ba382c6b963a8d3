"""Predictions are the bytes that benchmarks count over a stated bandwidth, and say that they are predictions."""

import json

import pytest
import torch

from kvcache_plugins.console.results import with_results
from kvcache_plugins.eval.benchmarks import prediction
from kvcache_plugins.eval.benchmarks.contest import Contest, Shape
from kvcache_plugins.eval.benchmarks.prediction import benchmark_prediction


command = with_results(benchmark_prediction)


SHAPE = Shape(batch_size=3, context=128, num_heads=2, groups=2, head_dim=64)


def test_bytes_are_those_that_a_benchmark_counts():
    contest = Contest(SHAPE, torch.float32, torch.device("cpu"))
    contest.add("gear-2bit")
    rows = prediction.predict(["gear-2bit"], SHAPE, torch.float32, 1e9)
    dense, gear = (row["bytes"] for row in rows)
    assert dense == contest.num_bytes["dense float32"]
    # A cache also holds where each item's exact tokens begin and how many there are: two numbers of 8 bytes
    assert gear == contest.num_bytes["gear-2bit"] + SHAPE.batch_size * 2 * 8


def test_times_are_bytes_over_bandwidth():
    rows = prediction.predict(["kivi-2bit", "dynamic"], SHAPE, torch.bfloat16, 5e9)
    assert [row["cache"] for row in rows] == ["dynamic", "kivi-2bit"]
    for row in rows:
        assert row["predicted_s"] == pytest.approx(row["bytes"] / 5e9)
        assert row["predicted_speed_against_dense"] == pytest.approx(rows[0]["bytes"] / row["bytes"])


def test_a_result_is_marked_as_a_prediction(tmp_path, capsys):
    options = {"shape": ["1x64", "2x128"], "cache": ["kivi-2bit"], "num_heads": 1, "head_dim": 64, "dtype": "bfloat16"}
    command(bandwidth=100.0, **options, out=tmp_path / "p.json")
    content = json.loads((tmp_path / "p.json").read_text())
    assert content["benchmark"] == "prediction"
    assert content["device"] == "predicted, not measured"
    assert content["settings"]["bandwidth_gb_s"] == 100
    sizes = [(row["batch_size"], row["context"], row["cache"]) for row in content["rows"]]
    assert sizes == [(1, 64, "dynamic"), (1, 64, "kivi-2bit"), (2, 128, "dynamic"), (2, 128, "kivi-2bit")]
    printed = capsys.readouterr().out
    assert "not measurements" in printed
    assert "2 launches, not in the time" in printed


@pytest.mark.parametrize("text", ["16", "x128", "0x128", "16x", "ax1", "1x2x3"])
def test_a_shape_without_two_numbers_is_refused(text):
    with pytest.raises(ValueError, match="`shape` has the form BATCHxTOKENS"):
        command(bandwidth=1.0, shape=[text])


def test_a_bandwidth_is_above_zero():
    with pytest.raises(ValueError, match="`bandwidth` must be above 0"):
        command(bandwidth=0.0)
