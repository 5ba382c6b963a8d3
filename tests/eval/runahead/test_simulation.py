"""The simulation says what it is, stands beside the paper's numbers, and predicts what follows its model."""

import json
import statistics
from pathlib import Path

import pytest

from kvcache_plugins.console.results import with_results
from kvcache_plugins.eval.runahead import simulation
from kvcache_plugins.eval.runahead.paper import MODELS, cost_of, paper_rows
from kvcache_plugins.eval.runahead.simulation import simulate
from kvcache_plugins.kv_runahead.planner import CostModel, Link, predict_ttft


command = with_results(simulate)


COST = CostModel(fixed=0.02, per_token=2e-4, per_pair=3e-8, triangle=0.5)
LINK = Link(latency=1e-5, bytes_per_second=2e9)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return paper_rows()


def test_models_have_their_names_size() -> None:
    billions = {name: shapes.num_layers * shapes.num_weights / 1e9 for name, shapes in MODELS.items()}
    assert billions == pytest.approx(
        {"llama-7b": 6.5, "llama-13b": 12.7, "llama-30b": 32, "falcon-1b": 1.2, "falcon-7b": 6.6}, rel=0.02
    )
    assert MODELS["llama-7b"].projection_share == pytest.approx(0.249, abs=1e-3)


def test_one_gpu_is_fitted() -> None:
    cost = cost_of("llama-7b")
    for length, seconds in {4096: 0.65, 8192: 1.95, 12288: 3.95}.items():
        assert cost.seconds(length, 0) == pytest.approx(seconds, rel=0.02)
    assert cost.per_token * 4096 == pytest.approx(0.317, rel=0.03)
    assert cost.per_pair * 4096**2 == pytest.approx(0.333, rel=0.03)


def test_long_contexts_are_near_the_paper(rows: list[dict]) -> None:
    """Llama from 8k tokens; below, the paper's GPUs waited for kernels to be launched, which is not simulated."""
    compared = [row for row in rows if row["table"] == 1 and row["length"] >= 8192 and "llama" in row["model"]]
    assert len(compared) == 12
    for row in compared:
        assert 0.79 < row["runahead_against_paper"] < 1
        assert 0.85 < row["tsp_against_paper"] < 1
    assert statistics.median(row["runahead_against_paper"] for row in compared) > 0.88
    four = [row for row in compared if row["num_ranks"] == 4]
    assert all(row["runahead_against_paper"] > 0.89 for row in four)


def test_slow_link_of_the_paper_was_shared(rows: list[dict]) -> None:
    """
    Four GPUs at 10 GB/s: the partition of the fast link over one bus gives the paper's seconds.

    At 1k the paper's GPUs waited for launches.
    """
    compared = [row for row in rows if (row["table"], row["gb_s"], row["num_ranks"]) == (3, 10, 4)]
    ratios = {row["length"]: row["unadapted_against_paper"] for row in compared}
    assert {length: ratio for length, ratio in ratios.items() if length > 1024} == pytest.approx(
        dict.fromkeys((2048, 4096, 8192, 12288), 1.0), abs=0.09
    )
    assert all(row["runahead_s"] <= row["unadapted_s"] for row in compared)


def test_prints_and_writes(tmp_path: Path, capsys, monkeypatch, rows: list[dict]) -> None:
    monkeypatch.setattr(simulation, "paper_rows", lambda: rows)
    command(ranks=[2, 4], bandwidth=[300, 1], length=[4096], out=tmp_path / "result.json")
    printed = capsys.readouterr().out
    assert "simulated from timings of one device, not measured" in printed
    assert "llama-7b, 1 GB/s: seconds to the first token, simulated" in printed
    assert "table 1 from 4096 tokens, KV-Runahead: simulated over the paper's" in printed
    content = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (content["benchmark"], content["device"]) == ("runahead-simulation", "simulated, not measured")
    assert [(row["gb_s"], row["num_ranks"]) for row in content["rows"]] == [(300, 2), (300, 4), (1, 2), (1, 4)]
    for row in content["rows"]:
        assert sum(row["lengths"]) == 4096
        assert row["runahead_s"] < row["tsp_s"]
        assert row["runahead_s"] < row["one_rank_s"]
    assert len(content["paper_rows"]) == 44 + 20 == len(rows)


def runs_of_model() -> list[dict[str, object]]:
    slices = [[1000], [4000], [8000], [600, 400], [5000, 3000]]
    return [
        {
            "lengths": each,
            "num_ranks": len(each),
            "seconds": predict_ttft(each, COST, LINK, 1536, 30),
            "date": "not looked at",
        }
        for each in slices
    ]


def test_predicts_measured_runs(tmp_path: Path, capsys) -> None:
    path = tmp_path / "runs.json"
    # What is not simulated is left out
    others = [{**runs_of_model()[-1], "seconds": 9, **each} for each in ({"method": "TSP"}, {"link": "throttled"})]
    for content in (runs_of_model(), {"rows": [*runs_of_model(), *others]}):
        path.write_text(json.dumps(content), encoding="utf-8")
        command(bandwidth=[2], measured=path, out=tmp_path / "result.json")
    assert "off by 0.0 % (median), 0.0 % at most" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [row["num_ranks"] for row in result["rows"]] == [2, 2]
    assert [row["simulated_against_measured"] for row in result["rows"]] == pytest.approx([1, 1])
    assert result["settings"]["measured"] == "runs.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON file"),
        ("{}", "has to hold a list of objects"),
        ('[{"lengths": [1], "num_ranks": 2, "seconds": 1}]', "a run has to have `lengths`"),
        ('[{"lengths": [1], "num_ranks": 1}]', "a run has to have `lengths`"),
        ('[{"lengths": [0], "num_ranks": 1, "seconds": 1}]', "a run has to have `lengths`"),
        ('[{"lengths": [9], "num_ranks": 1, "seconds": 1}]', "`timings` has to hold slices of two lengths"),
        (json.dumps(runs_of_model()[:3]), "`measured` has to hold a run of more than one rank"),
    ],
)
def test_wrong_runs_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "runs.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        command(bandwidth=[2], measured=tmp_path / "runs.json")


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`model` has to be one of \\['llama-7b'"):
        command(model="llama")
    with pytest.raises(ValueError, match="`bandwidth` has to be the one of the `measured` runs but got \\[1, 2\\]"):
        command(bandwidth=[1, 2], measured=tmp_path / "runs.json")
