"""Tasks that need much of their context: their answers are right, and the decode steps that tell them are scored."""

import json
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins.eval.context_tasks import TASKS, make_sample
from kvcache_plugins.eval.measures.answers import measure_tasks
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
def test_what_cannot_be_made_is_refused(task: str, length: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_sample(task, len, length, 20)


def test_states_follow_from_swaps_and_examples_are_not_asked_for() -> None:
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


def test_decode_steps_are_scored(tiny_model: Callable[..., PreTrainedModel], characters) -> None:
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
