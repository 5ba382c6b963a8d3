"""Answers behind long contexts: retrieval of one line or value, and tasks that need much of their context.

The context with its question, all but its last token, fills the cache in one forward. The right answer is then fed
token by token, so that a decode step predicts each of its tokens. A token is right if it is the likeliest; an answer,
or a line of one, is right if all its tokens are, so that greedy decoding would give it. Tasks are also measured by
negative log-likelihoods and KL to the dense cache.

Retrieval has two sets, which differ in their fields: LongChat's lines (`prompt`, `expected_number`) and
lost-in-the-middle's key-value pairs (`ordered_kv_records`, `key`, `value`). Tasks are made, see `context_tasks`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console import inputs
from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval import harness
from kvcache_plugins.eval.context_tasks import TASKS, Question, make_sample
from kvcache_plugins.eval.continuations import DECODE, ContinuationScorer, Score
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.reports.memory import measure_memory

from .fidelity import continuation_logits, fill_cache, score_logits


def read_questions(path: Path, num_records: int | None = None) -> list[Question]:
    """
    Read the questions of a JSON-lines file; raise a `ValueError` for a row of neither set. With `num_records` a
    context keeps that many lines or pairs, which is easier for small models: neighbours of the one asked for, which
    stays at the same relative place.
    """
    check_integer("records", num_records, 1, is_optional=True)
    return [_question(row, path, num_records) for row in harness.read_rows(path, "data_file")]


def _around(place: int, total: int, num_records: int | None) -> slice:
    """Return a slice of `num_records` of `total` records, in which `place` has the same relative position."""
    if num_records is None or num_records >= total:
        return slice(None)
    start = place - place * num_records // total
    return slice(start, start + num_records)


def _question(row: Mapping[str, Any], path: Path, num_records: int | None) -> Question:
    if "expected_number" in row:
        name = "-".join(str(part) for part in row["random_idx"][:-1])
        lines = row["prompt"].rstrip().split("\n")
        places = [place for place, line in enumerate(lines) if line.startswith("line ")]
        asked = next(place for place in places if lines[place].startswith(f"line {name}:"))
        kept = set(places[_around(places.index(asked), len(places), num_records)])
        prompt = "\n".join(line for place, line in enumerate(lines) if place in kept or place not in places)
        context = f"{prompt}\n\nThe <REGISTER_CONTENT> in line {name} is <"
        return Question(context=context, answer=f"{row['expected_number']}>")
    if "ordered_kv_records" in row:
        pairs = row["ordered_kv_records"]
        asked = [key for key, _ in pairs].index(row["key"])
        records = json.dumps(dict(pairs[_around(asked, len(pairs), num_records)]), indent=1)
        context = (
            "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
            f'{records}\n\nKey: "{row["key"]}"\nCorresponding value: "'
        )
        return Question(context=context, answer=f'{row["value"]}"')
    raise ValueError(f"`data_file`: rows of {path} have fields {sorted(row)}, which are of neither set")


def answer_questions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    factories: Mapping[str, harness.CacheFactory],
    on_progress: Callable[[str], None] = lambda text: None,
    batch_size: int = 1,
) -> Iterator[dict[str, Any]]:
    """
    Ask every cache every question, `batch_size` decoded together. Yield a row for each: `accuracy` of whole answers
    with its `standard_error`, `token_accuracy`, `correct` by question, and what the longest cache held and counted.
    """
    check_integer("batch_size", batch_size, 1)
    contexts = [tokenizer(each.context).input_ids for each in questions]
    answers = [[tokenizer(each.answer, add_special_tokens=False).input_ids] for each in questions]
    scorers = {name: ContinuationScorer(model, factory) for name, factory in factories.items()}
    scores: dict[str, list[Score]] = {name: [] for name in factories}
    for start in range(0, len(questions), batch_size):
        part = slice(start, start + batch_size)
        for name, scorer in scorers.items():
            on_progress(f"question {min(start + batch_size, len(questions))} of {len(questions)}")
            scores[name].extend(score for (score,) in scorer.score(contexts[part], answers[part], DECODE))
    for name, own in scores.items():
        accuracy = sum(score.is_greedy for score in own) / len(own)
        held = scorers[name].record.largest
        yield {
            "cache": name,
            "accuracy": accuracy,
            "standard_error": math.sqrt(accuracy * (1 - accuracy) / len(own)),
            "token_accuracy": sum(score.num_greedy for score in own) / sum(score.num_tokens for score in own),
            "correct": [score.is_greedy for score in own],
            "memory_at_end": None if held is None else memory_fields(held),
            "stats": dict(scorers[name].record.stats),
        }


# Tasks that need much of their context

_Ids = tuple[tuple[int, ...], tuple[int, ...]]
# Logits of the dense cache by prompt and answer, with which all caches of a sweep are compared
_dense: WeakKeyDictionary[PreTrainedModel, dict[_Ids, torch.Tensor]] = WeakKeyDictionary()


def decode_answer(model: PreTrainedModel, ids: _Ids, cache: Cache) -> torch.Tensor:
    """Feed a prompt and its answer to the model; return the logits of each answer token, `[tokens, vocabulary]`."""
    prompt, answer = map(torch.tensor, ids)
    fill_cache(model, prompt[:-1], cache)
    return continuation_logits(model, torch.cat([prompt[-1:], answer[:-1]]), cache, chunk=1)


def measure_tasks(
    cache: Sequence[str],
    model: str | inputs.LoadedModel,
    tasks: Sequence[str] = tuple(TASKS),
    length: int = 2048,
    samples: int = 1,
    scored: int = 96,
    start: float | None = None,
    data_file: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Score caches by their specs on `samples` of each task, of `length` tokens, with at most `scored` tokens of the
    answer, which begin at the share `start` of it, 0 to 1; by default shares are spread over the samples. `data_file`
    has rows of `chain_of_thought` as JSON lines with `question` and `answer`.

    Yields a row for each cache. By task: mean `nll` and `kl` of a token, shares of tokens `right`, of whole `lines`
    and of samples that are `exact`, and sizes. Over all tasks: mean `kl`; bytes fetched in a decode step, as
    `fetched_bytes` and as a share of a 16-bit cache (`fetched_share`), `None` if nothing is fetched; memory and
    counters of the last cache.
    """
    network, tokenizer = inputs.load_for_evaluation(model)
    known = _dense.setdefault(network, {})
    rows = harness.read_rows(data_file, "data_file") if data_file else []

    def count_tokens(text: str) -> int:
        return len(tokenizer(text).input_ids)

    for spec, factory in harness.cache_factories(cache, network).items():
        totals: dict[str, Any] = {task: Counter() for task in tasks}
        for task, total in totals.items():
            for index in range(samples):
                place = (index + 0.5) / samples if start is None else start
                sample = make_sample(task, count_tokens, length, scored, place, index, rows)
                prompt = tokenizer(sample.context).input_ids
                ids = tuple(prompt), tuple(tokenizer(sample.answer, add_special_tokens=False).input_ids)
                filled = factory()
                logits = decode_answer(network, ids, filled)
                if ids not in known:
                    exact = DynamicCache(config=network.config)
                    known[ids] = logits if spec == harness.REFERENCE else decode_answer(network, ids, exact)
                targets = torch.tensor(ids[1], dtype=torch.int64, device=logits.device)
                score, right = score_logits(known[ids], logits, targets), logits.argmax(-1) == targets
                ends = [at for at, token in enumerate(ids[1], 1) if "\n" in tokenizer.decode([token])]
                lines = [bool(right[slice(*each)].all()) for each in pairwise([0, *ends])]
                total.update(nll=score.nll, kl=score.kl, right=int(right.sum()), exact=int(right.all()))
                total.update(num_scored=len(ids[1]), prompt=len(prompt), lines=sum(lines), num_lines=len(lines))
                memory, stats = measure_memory(filled), harness.cache_stats(filled)
                moved: Any = stats.get("bytes_fetched", 0)
                total.update(fetched=moved, share=moved * memory.kv_percent / (100 * memory.total_bytes))
        by_task = {
            task: {
                **{name: total[name] / total["num_scored"] for name in ("nll", "kl", "right")},
                "lines": total["lines"] / max(total["num_lines"], 1),
                **{name: total[name] / samples for name in ("exact", "prompt")},
                "num_scored": total["num_scored"],
            }
            for task, total in totals.items()
        }
        whole: Counter[str] = sum(totals.values(), Counter())
        yield {
            "cache": spec,
            "tasks": by_task,
            "kl": sum(each["kl"] for each in by_task.values()) / len(by_task),
            "fetched_bytes": whole["fetched"] / whole["num_scored"] or None,
            "fetched_share": whole["share"] / whole["num_scored"] or None,
            "memory_at_end": memory_fields(memory),
            "stats": stats,
        }
