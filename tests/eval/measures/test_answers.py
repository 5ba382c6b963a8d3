"""Tasks that need much of their context, and retrieval: questions are read as both sets hold them, answers are right,
and the decode steps that tell them are scored.
"""

import json
import re
from collections import Counter
from functools import partial

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.eval.context_tasks import TASKS, Question, make_sample
from kvcache_plugins.eval.measures.answers import answer_questions, measure_tasks, read_questions
from kvcache_plugins.eval.tables import render_context


def is_right(task: str, context: str, line: str) -> bool:
    """Tells by the context alone whether a line of the answer is right."""
    if task == "records":
        person = json.loads(line)
        own = next(each for each in re.split(r"(?<=\\.) ", context) if f"{person['name']}" in each)
        return all(str(value) in own for value in person.values())
    if task == "needles":
        return "The code of {} is {}.".format(*line.split(": ")) in context
    if task == "table":
        return f"<tr><td>{'</td><td>'.join(line.split())}</td></tr>" in context
    if task == "copying":
        return f"\n{line}\n" in context
    if task == "variables":
        value, *names = line.replace(":", "").split()
        known = {value}
        for new, old in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context):
            known |= {new} if old in known else set()
        return known == {value, *names}
    common = Counter(context.partition("\n")[0].split()).most_common(3)
    return [word for word, _ in common] == line.split()


@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_contexts_as_long_as_asked_for(task: str, place: float) -> None:
    first, again = (make_sample(task, len, 3000, 120, place, seed=7) for _ in range(2))
    assert first == again != make_sample(task, len, 3000, 120, place, seed=8)
    assert 2700 < len(first.context) <= 3000
    lines = first.answer.splitlines()
    assert lines and (len(first.answer) <= 120 or len(lines) == 1)
    assert all(is_right(task, first.context, line) for line in lines)
    # From a later place on, the lines before are there already
    assert task == "words" or not place or is_right(task, first.context, first.context.splitlines()[-1])


@pytest.mark.parametrize(
    ("task", "length", "complaint"),
    [("tables", 900, "`tables` is no task; there are records, needles"), ("records", 9, "`length`: nothing of")],
)
def test_impossible_tasks_are_refused(task: str, length: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_sample(task, len, length, 20)


def test_swapped_states_are_right_and_examples_are_not_asked() -> None:
    sample = make_sample("states", len, 2000, 900, 0.0)
    cups = {0: sample.context.splitlines()[0].removeprefix("Five cups in a row hold: ").split()}
    for step, one, other in re.findall(r"(\d+)\. swap (\d) and (\d)", sample.context):
        now = cups[int(step)] = list(cups[int(step) - 1])
        now[int(one) - 1], now[int(other) - 1] = now[int(other) - 1], now[int(one) - 1]
    told = [line.split() for line in sample.answer.splitlines()]
    assert len(told) > 20 and all(cups[int(float(step))] == held for step, *held in told)

    rows = [{"question": f"{n} + 1?", "answer": f"{n} and 1\nis {n + 1}"} for n in range(9)]
    sample = make_sample("chain_of_thought", len, 120, 60, 0.0, rows=rows)
    *_, asked = re.findall(r"Question: (\d) \+ 1\?", sample.context)
    assert sample.context.count("Question: ") > 2 and sample.context.count(f"{asked} and 1") == 0
    assert sample.answer == f"{asked} and 1\nis {int(asked) + 1}\n"


def test_decode_steps_are_scored(tiny_model, characters):
    # InfiniGen offloads the third layer
    model = tiny_model("llama", num_hidden_layers=3)
    options = {"tasks": ["copying", "words"], "length": 700, "samples": 2, "scored": 40}
    rows = list(measure_tasks(["dynamic", "h2o", "infinigen"], (model, characters), **options))
    nll = num_scored = 0
    for index, place in enumerate((0.25, 0.75)):
        sample = make_sample("copying", len, 700, 40, place, index)
        token_ids = torch.tensor([[ord(each) for each in "".join(sample)]])
        with torch.no_grad():
            log_probs = model(token_ids).logits[0].double().log_softmax(dim=-1)
        count = len(sample.answer)
        nll -= float(log_probs[-count - 1 : -1].gather(1, token_ids[0, -count:, None]).sum())
        num_scored += count
    dense, lossy, fetching = rows
    found = dense["tasks"]["copying"]
    assert found["num_scored"] == num_scored and found["nll"] == pytest.approx(nll / num_scored, abs=1e-5)
    assert found["kl"] == 0 <= found["exact"] <= found["lines"] <= found["right"] <= 1
    assert lossy["tasks"]["copying"]["kl"] > 1e-6 and lossy["fetched_bytes"] is None
    assert 0 < fetching["fetched_share"] < 1 and fetching["fetched_bytes"] > 0
    assert lossy["memory_at_end"]["total_bytes"] < dense["memory_at_end"]["total_bytes"]
    # Held against what another run has found dense
    (alone,) = measure_tasks(["h2o"], (model, characters), **options)
    assert alone["tasks"] == lossy["tasks"]
    shown = render_context(rows)
    assert shown.count("| `h2o` |") == 4 and f"copying {num_scored}" in shown


LINE = {
    "random_idx": ["torpid-kid", 7],
    "expected_number": 2416,
    "prompt": "line torpid-kid: REGISTER_CONTENT is <2416>\n\nI need the number. ",
}
PAIRS = {"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "b", "value": "2"}


def write_rows(path, *rows: dict[str, object]):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_lines_and_pairs_are_parsed(tmp_path) -> None:
    line, pair = read_questions(write_rows(tmp_path / "rows.jsonl", LINE, PAIRS))
    assert line.context.endswith("I need the number.\n\nThe <REGISTER_CONTENT> in line torpid-kid is <")
    assert line.answer == "2416>"
    assert '"a": "1"' in pair.context
    assert pair.context.endswith('Key: "b"\nCorresponding value: "')
    assert pair.answer == '2"'


@pytest.mark.parametrize("asked", range(10))
@pytest.mark.parametrize("num_records", [1, 3, 9, 10, 20])
def test_records_are_reduced_around_the_asked_one(tmp_path, asked: int, num_records: int) -> None:
    pairs = {"ordered_kv_records": [[f"key{i}", f"v{i}"] for i in range(10)], "key": f"key{asked}", "value": "x"}
    text = "\n".join(["Record:", "", *(f"line name{i}: content <{i}>" for i in range(10)), "", "Now tell me."])
    lines = {"random_idx": [f"name{asked}", asked], "expected_number": asked, "prompt": text}
    by_line, by_pair = read_questions(write_rows(tmp_path / "rows.jsonl", lines, pairs), num_records)
    kept = [i for i in range(10) if f"line name{i}:" in by_line.context]
    assert kept == [i for i in range(10) if f'"key{i}": "v{i}"' in by_pair.context]
    assert len(kept) == min(num_records, 10) and asked in kept
    # In order, side by side, and as far along as among all
    assert kept == list(range(kept[0], kept[0] + len(kept)))
    assert kept.index(asked) == asked * len(kept) // 10
    assert "Record:\n\nline" in by_line.context and "\n\nNow tell me." in by_line.context


@pytest.mark.parametrize(
    ("row", "records", "message"),
    [
        (PAIRS, 0, "`records` has to be an integer of at least 1"),
        ({"question": "?"}, None, "`data_file`.*neither set"),
    ],
)
def test_unaskable_questions_are_refused(tmp_path, row, records, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(write_rows(tmp_path / "rows.jsonl", row), records)


def test_an_answer_is_right_if_greedy_decoding_gives_it(tiny_llama: PreTrainedModel, characters) -> None:
    context = "Call me Ishmael. " * 12
    token_ids = torch.tensor([[ord(character) for character in context]])
    said = tiny_llama.generate(token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=5, do_sample=False)
    answer = "".join(chr(token) for token in said[0, -5:])
    wrong = answer[:3] + chr((ord(answer[3]) + 1) % 128) + answer[4:]
    questions = [Question(context=context, answer=each) for each in (answer, wrong)]
    announced: list[str] = []
    factories = {
        "dynamic": partial(DynamicCache, config=tiny_llama.config),
        "h2o": partial(create_cache, "h2o", tiny_llama.config, heavy_ratio=0.05, recent_ratio=0.05, min_tokens=4),
    }
    dense, lossy = answer_questions(tiny_llama, characters, questions, factories, announced.append)
    assert dense["correct"] == [True, False]
    assert (dense["accuracy"], dense["standard_error"]) == (0.5, pytest.approx(0.5 / 2**0.5))
    # The first three tokens of the wrong answer are right; those behind the wrong one may be anything
    assert 0.8 <= dense["token_accuracy"] <= 0.9
    assert lossy["stats"]["tokens_cached"] > 0 < lossy["memory_at_end"]["total_bytes"]
    assert lossy["token_accuracy"] < dense["token_accuracy"]
    assert len(announced) == 4
