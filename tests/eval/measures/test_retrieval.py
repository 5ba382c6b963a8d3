"""Retrieval: questions are read as both sets hold them, and a row is right only if its whole answer is."""

import json
from functools import partial

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.eval.context_tasks import Question
from kvcache_plugins.eval.measures.answers import answer_questions, read_questions


LINE = {
    "random_idx": ["torpid-kid", 7],
    "expected_number": 2416,
    "prompt": "line torpid-kid: REGISTER_CONTENT is <2416>\n\nI need the number. ",
}
PAIRS = {"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "b", "value": "2"}


def write_rows(path, *rows: dict[str, object]):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_both_sets_are_read(tmp_path) -> None:
    line, pair = read_questions(write_rows(tmp_path / "rows.jsonl", LINE, PAIRS))
    assert line.context.endswith("I need the number.\n\nThe <REGISTER_CONTENT> in line torpid-kid is <")
    assert line.answer == "2416>"
    assert '"a": "1"' in pair.context
    assert pair.context.endswith('Key: "b"\nCorresponding value: "')
    assert pair.answer == '2"'


@pytest.mark.parametrize("asked", range(10))
@pytest.mark.parametrize("num_records", [1, 3, 9, 10, 20])
def test_fewer_records(tmp_path, asked: int, num_records: int) -> None:
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
def test_what_cannot_be_asked_is_refused(tmp_path, row, records, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(write_rows(tmp_path / "rows.jsonl", row), records)


def test_an_answer_is_right_if_greedy_decoding_says_it(tiny_llama: PreTrainedModel, characters) -> None:
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
    # Of the wrong answer the first three tokens are right, what follows the wrong one may be anything
    assert 0.8 <= dense["token_accuracy"] <= 0.9
    assert lossy["stats"]["tokens_cached"] > 0 < lossy["memory_at_end"]["total_bytes"]
    assert lossy["token_accuracy"] < dense["token_accuracy"]
    assert len(announced) == 4
