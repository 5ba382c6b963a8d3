"""The benchmark of prompts that were read before: who knows how much of them, and that answers stay the same."""

import json

import pytest
from typer.testing import CliRunner

from kvcache_plugins import cli
from kvcache_plugins.eval.benchmarks import store as benchmark_store
from kvcache_plugins.eval.benchmarks.store_process import answer_prompts
from kvcache_plugins.eval.tables.store_tables import render_store


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(33 + number * number % 90) for number in range(3000)), encoding="utf-8")
    return path


def run(folder, text_file, *arguments):
    options = ["--model", folder, "--text-file", str(text_file), "--document", "800", "--question-tokens", "20"]
    return CliRunner().invoke(cli.app, ["bench", "store", *options, "--new-tokens", "4", "--json", *arguments])


@pytest.fixture
def in_this_process(monkeypatch):
    """What processes do, without their start."""
    monkeypatch.setattr(benchmark_store, "_run_process", answer_prompts)


def test_rows(tiny_folder, text_file, in_this_process):
    ways = [
        "--way",
        "none",
        "--way",
        "pickle",
        "--way",
        "gear-t22",
        "--questions",
        "3",
        "--turns",
        "2",
        "--unaided",
        "2",
    ]
    result = run(tiny_folder, text_file, *ways)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    known = {
        (scenario, way): [row["num_saved"] for row in rows if (row["scenario"], row["way"]) == (scenario, way)]
        for scenario in ("again", "questions", "documents", "chat")
        for way in ("none", "pickle", "gear-t22")
    }
    assert known["again", "gear-t22"] == [0, 768, 768, 512]
    assert known["again", "pickle"] == [0, 799, 799, 600]
    assert all(known[scenario, "none"] == [0, 0] for scenario in ("again", "questions", "documents", "chat"))
    asked = {(row["scenario"], row["prompts_of_scenario"]) for row in rows}
    assert asked == {("again", 4), ("questions", 6), ("documents", 6), ("chat", 2)}
    assert known["questions", "gear-t22"] == [0, 768, 768, 768, 768, 768]
    assert known["documents", "gear-t22"] == [0, 0, 0, 768, 768, 768]
    # One file knows one document
    assert max(known["documents", "pickle"]) < 256
    assert known["chat", "gear-t22"] == [0, 768] and known["chat", "pickle"] == [0, 820]
    assert all(row["first_token_s"] > 0 and row["first_token_cpu_s"] > 0 for row in rows)
    assert all((row["disk_bytes"] == 0) == (row["way"] == "none") for row in rows)
    table = render_store(rows)
    # `again` has a line a prompt; of `questions` the first one is told apart from those that find it known
    again = [line for line in table.splitlines() if line.startswith("| again | `gear-t22`")]
    questions = [line for line in table.splitlines() if line.startswith("| questions | `gear-t22`")]
    assert [line.split("|")[4].strip() for line in again] == ["1"] * 4
    assert [line.split("|")[4].strip() for line in questions] == ["1", "2", "3"]
    assert "(2 of 6)" in table and "(6)" in table


def test_a_process_of_its_own(tiny_folder, text_file):
    result = run(tiny_folder, text_file, "--way", "gear", "--scenario", "chat", "--turns", "1")
    assert result.exit_code == 0, result.output
    assert [row["num_tokens"] for row in json.loads(result.stdout)["rows"]] == [820]


def test_another_answer_is_no_result(tiny_folder, text_file, monkeypatch):
    answers = iter(range(100))

    def answer(request):
        return [{"tokens": [next(answers)], "first_token_s": 1.0} for _ in request["prompts"]]

    monkeypatch.setattr(benchmark_store, "_run_process", answer)
    monkeypatch.setattr(benchmark_store, "describe", str)
    result = run(tiny_folder, text_file, "--way", "gear")
    assert isinstance(result.exception, RuntimeError) and "in two ways" in str(result.exception)


def test_what_cannot_be_measured_is_refused(tiny_folder, text_file):
    for arguments, message in (
        (["--scenario", "never"], "`scenario`"),
        (["--way", "nothing"], "nothing"),
        (["--document", "5000"], "15000 are needed"),
    ):
        result = run(tiny_folder, text_file, *arguments)
        assert result.exit_code == 2 and message in result.stderr
