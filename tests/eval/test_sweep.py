"""Sweeps: every cell leaves one file, none is repeated or lost, and what is wrong in the file is named."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvcache_plugins.eval.sweep import Run, Sweep
from kvcache_plugins.eval.tables import render_sweep


PAIRS = {"ordered_kv_records": [["a", "one"], ["b", "two"], ["c", "three"]], "key": "b", "value": "two"}


@pytest.fixture
def config(saved_with_tokenizer: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of three caches and three measures on a tiny model, with its text in a folder of a variable."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long. " * 30)
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(PAIRS)}\n{json.dumps(PAIRS)}")
    monkeypatch.setenv("SWEEP_TEXTS", str(tmp_path / "texts"))
    content = {
        "models": [saved_with_tokenizer("llama")],
        "caches": ["dynamic", "gear-2bit", "kivi-2bit"],
        "out": "results/small",
        "measures": {
            "book": {"fidelity": {"text_file": "$SWEEP_TEXTS/book.txt", "windows": 2, "prefix": 96, "scored": 24}},
            "drift": {"perplexity": {"text_file": "$SWEEP_TEXTS/book.txt", "length": 96, "chunk": 8, "stretch": 32}},
            "pairs": {"retrieval": {"data_file": "pairs.jsonl"}},
        },
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def results_of(config: Path) -> dict[str, dict[str, object]]:
    contents = [json.loads(path.read_text()) for path in (config.parent / "results" / "small").glob("*")]
    return {f"{each['settings']['name']}/{each['settings']['cache']}": each for each in contents}


def test_an_interrupted_sweep_resumes(config: Path, monkeypatch: pytest.MonkeyPatch, run) -> None:
    measure, measured = Run.measure, []

    def interrupted(own: Run, *rest: object) -> dict[str, object]:
        measured.append(own.label)
        if len(measured) == 5:
            raise KeyboardInterrupt
        return measure(own, *rest)

    monkeypatch.setattr(Run, "measure", interrupted)
    run("eval", "sweep", str(config), code=130)
    first = results_of(config)
    assert len(first) == 4
    result = run("eval", "sweep", str(config))
    assert "5 of 9 runs to do" in result.stderr and "about" in result.stderr
    assert len(measured) == 5 + 5
    contents = results_of(config)
    assert len(contents) == 9
    assert all(contents[label] == content for label, content in first.items())
    assert "0 of 9 runs to do" in run("eval", "sweep", str(config)).stderr
    dense, lossy = contents["book/dynamic"], contents["book/gear-2bit"]
    assert dense["result"]["kl"] == pytest.approx(0, abs=1e-9) and lossy["result"]["kl"] > 1e-3
    assert lossy["memory"]["total_bytes"] < dense["memory"]["total_bytes"]
    assert {"commit", "date", "device", "versions", "seconds"} <= lossy.keys()
    # One row again gives the same numbers
    run("eval", "sweep", str(config), "--only", "*/gear-2bit", "--again")
    for label, content in results_of(config).items():
        assert content["result"] == contents[label]["result"]


def test_sweep_results_are_rendered_as_tables_and_figures(config: Path, tmp_path: Path, run) -> None:
    pytest.importorskip("matplotlib")
    run("eval", "sweep", str(config))
    folder = tmp_path / "results" / "small"
    result = run("eval", "report", str(folder), "--figures", str(tmp_path / "figures"))
    assert result.stdout == render_sweep(folder) + "\n"
    for heading in ("**book**", "**drift**", "**pairs**", "to 32", "KL to dense", "answers right"):
        assert heading in result.stdout
    assert result.stdout.count("| `gear-2bit` |") == 3
    assert "kvcache-plugins eval sweep small.yaml --only 'book/" in result.stdout
    names = sorted(path.name.split("llama")[0] for path in (tmp_path / "figures").iterdir())
    assert [name.split("-")[1] for name in names] == ["book", "drift", "drift", "pairs"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "figures").iterdir())


def test_a_failing_cache_does_not_stop_the_others(config: Path, monkeypatch: pytest.MonkeyPatch, run) -> None:
    measure = Run.measure

    def failing(own: Run, *rest: object) -> dict[str, object]:
        if own.cache == "gear-2bit":
            raise RuntimeError("out of luck")
        return measure(own, *rest)

    monkeypatch.setattr(Run, "measure", failing)
    result = run("eval", "sweep", str(config), "--only", "book/*", code=1)
    said = " ".join(result.stderr.split())
    assert "gear-2bit failed: RuntimeError: out of luck" in said and "1 runs failed" in said
    assert len(results_of(config)) == 2
    listed = run("eval", "sweep", str(config), "--only", "book/*", "--dry-run").stdout.split()
    assert len(listed) == 1 and listed[0].endswith("/gear-2bit")


def test_a_task_of_lm_eval_is_a_measure(config: Path, tmp_path: Path, run, make_task) -> None:
    pytest.importorskip("lm_eval")
    content = yaml.safe_load(config.read_text())
    rows = [{"text": f"Call me number {number}. " * 9, "label": number % 2} for number in range(6)]
    metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    # With two filters there is a sample of each item by each of them
    filters = [{"name": name, "filter": [{"function": "take_first"}]} for name in ("none", "again")]
    own = make_task("own", rows, ["no", "yes"], doc_to_target="label", metric_list=[metric], filter_list=filters)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    content["measures"] = {"own": {"task": "own.yaml", "limit": 5}}
    config.write_text(yaml.safe_dump(content))
    run("eval", "sweep", str(config))
    contents = results_of(config)
    dense, lossy = contents["own/dynamic"]["result"], contents["own/gear-2bit"]["result"]
    assert len(dense["by_item"]["acc,none"]) == dense["num_items"] == 5
    assert dense["metrics"]["acc,none"] == sum(dense["by_item"]["acc,none"]) / 5
    assert lossy["counters"]["contexts_exercised"] == 5
    differences = [
        one - other for one, other in zip(lossy["by_item"]["acc,none"], dense["by_item"]["acc,none"], strict=True)
    ]
    shown = f"{statistics.mean(differences):+.3f} ± {statistics.stdev(differences) / 5**0.5:.3f}"
    assert f" | {shown} |" in render_sweep(tmp_path / "results" / "small")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"caches": ["gaer"]}, "Unknown cache `gaer`"),
        ({"caches": ["gear-2bit:rnak=1"]}, "Unknown option `rnak`"),
        ({"modles": []}, "unknown `modles`. Known: caches"),
        ({"caches": "gear"}, "`caches` has to be a list but is 'gear'"),
        ({"models": "smollm2"}, "`models` has to be a list but is 'smollm2'"),
        ({"measures": ["x"]}, "`measures` has to be a mapping but is ['x']"),
        ({"measures": {"x": {"limit": 3}}}, "measure `x` has to have one of task, fidelity, perplexity, retrieval"),
        ({"measures": {"x": {"fidelity": {}, "windows": 2}}}, "measure `x`: the options of `fidelity` stand in it"),
        ({"measures": {"x": {"fidelity": {"widnows": 2}}}}, "`fidelity` has no option widnows. It has text_file"),
        ({"measures": {"x": {"fidelity": {"text_file": "$NO_SUCH/a"}}}}, "environment variable that is not set"),
        ({"measures": {"x": {"perplexity": {}}}}, "`perplexity` needs `text_file`, which is missing"),
    ],
)
def test_errors_of_a_config_are_named(config: Path, change: dict[str, object], complaint: str, run) -> None:
    content = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**content, **change}))
    result = run("eval", "sweep", str(config), code=None)
    assert result.exit_code in (1, 2)
    assert complaint in " ".join(result.stderr.split())


def test_missing_fields_and_unmatched_runs_are_errors(config: Path, run) -> None:
    assert "matches no run" in run("eval", "sweep", str(config), "--only", "nothing", code=2).stderr
    content = yaml.safe_load(config.read_text())
    del content["out"]
    config.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="missing `out`"):
        Sweep.read(config)
    assert "there is no result of a sweep" in run("eval", "report", str(config.parent), code=2).stderr
    config.write_text("models: [")
    assert "is no YAML" in run("eval", "sweep", str(config), code=2).stderr
    for text, message in (("[", "is no JSON ("), ("[]", "is no result")):
        (config.parent / "result.json").write_text(text)
        assert message in " ".join(run("eval", "report", str(config.parent / "result.json"), code=2).stderr.split())


def test_a_result_is_known_by_every_setting(config: Path) -> None:
    names = {run.file_name() for run in Sweep.read(config).runs}
    assert len(names) == 9
    content = yaml.safe_load(config.read_text())
    content["dtype"] = "bfloat16"
    config.write_text(yaml.safe_dump(content))
    assert not names & {run.file_name() for run in Sweep.read(config).runs}
