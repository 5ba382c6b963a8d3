"""The benchmark of prompts that were read before: who knows how much of them, and that answers stay the same."""

import pytest

from kvcache_plugins.eval.benchmarks import store
from kvcache_plugins.eval.tables import render_store


SIZES = "store --document 800 --question-tokens 20 --new-tokens 4"
SCENARIOS = ("again", "questions")


def test_rows(rows_of, monkeypatch):
    # What processes do, without their start
    monkeypatch.setattr(store, "_run_process", store.answer_prompts)
    rows = rows_of(f"{SIZES} --way none --way pickle --way gear-t22 --questions 3 --unaided 2")
    known = {
        (scenario, way): [row["num_saved"] for row in rows if (row["scenario"], row["way"]) == (scenario, way)]
        for scenario in SCENARIOS
        for way in ("none", "pickle", "gear-t22")
    }
    assert known["again", "gear-t22"] == [0, 768, 768, 512]
    assert known["again", "pickle"] == [0, 799, 799, 600]
    assert all(known[scenario, "none"] == [0, 0] for scenario in SCENARIOS)
    asked = {(row["scenario"], row["prompts_of_scenario"]) for row in rows}
    assert asked == {("again", 4), ("questions", 6)}
    assert known["questions", "gear-t22"] == [0, 768, 768, 768, 768, 768]
    assert all(row["first_token_s"] > 0 and row["first_token_cpu_s"] > 0 for row in rows)
    assert all((row["disk_bytes"] == 0) == (row["way"] == "none") for row in rows)
    # `again` has a line a prompt; of `questions` the first one is told apart from those that find it known
    lines = [line.split(" | ") for line in render_store(rows).splitlines()]
    counts = {name: [line[3] for line in lines if line[:2] == [f"| {name}", "`gear-t22`"]] for name in SCENARIOS}
    assert counts["again"] == ["1"] * 4 and counts["questions"] == ["1", "2", "3"]
    assert "(2 of 6)" in render_store(rows)


def test_a_process_of_its_own(rows_of):
    rows = rows_of(f"{SIZES} --way gear --scenario questions --questions 1")
    assert [row["num_tokens"] for row in rows] == [820, 820]


def test_another_answer_is_no_result(bench, monkeypatch):
    answers = iter(range(100))

    def answer(request):
        return [{"tokens": [next(answers)], "first_token_s": 1.0} for _ in request["prompts"]]

    monkeypatch.setattr(store, "_run_process", answer)
    result = bench(f"{SIZES} --way gear")
    assert isinstance(result.exception, RuntimeError) and "in two ways" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [("--scenario never", "`scenario`"), ("--way nothing", "nothing"), ("--document 5000", "10000 are needed")],
)
def test_what_cannot_be_measured_is_refused(assert_refused, options, message):
    assert_refused(f"{SIZES} {options}", message)
