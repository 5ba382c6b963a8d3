"""Retrieval from long contexts: is one line, or one value, of thousands of tokens still found through a cache?

Two sets, told apart by their fields: LongChat's lines (`prompt`, `expected_number`) and lost-in-the-middle's key-value
pairs (`ordered_kv_records`, `key`, `value`). The context with its question fills the cache; the answer is then fed
token by token, and a row is right if every token of it is the most likely one: just what greedy decoding would say.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console import inputs
from kvcache_plugins.console.display import track_progress
from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval import harness
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings
from kvcache_plugins.eval.continuations import DECODE, ContinuationScorer, Score
from kvcache_plugins.eval.rows import Found, Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A context that ends where the answer begins, and the answer."""

    context: str
    answer: str


def read_questions(path: Path, num_records: int | None = None) -> list[Question]:
    """
    Reads the questions of a JSON-lines file; a row of neither set raises a `ValueError`.

    With `num_records` only so many lines, or pairs, of each context are left: neighbours of the one that is asked for,
    which keeps its place among them. For models to which the whole sets are too hard, however they are read.
    """
    if num_records is not None and num_records < 1:
        raise ValueError(f"`records` has to be at least 1 but is {num_records}")
    return [_question(row, path, num_records) for row in harness.read_rows(path, "data_file")]


def _around(place: int, total: int, num_records: int | None) -> slice:
    """Places `num_records` of `total` so that the one at `place` is as far from their start as from that of all."""
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
    Asks every cache every question, `batch_size` of them decoded together. Yields a row for each: `accuracy` of whole
    answers with its `standard_error`, `token_accuracy` of the answers' tokens, `correct` by question, and of the
    longest cache at its end `memory_at_end` and counters.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` has to be at least 1 but is {batch_size}")
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


@benchmark("retrieval", "{model} on {data_file}, questions: {num_questions}", with_dense=True)
def evaluate_retrieval(
    data_file: Annotated[Path, typer.Option(help="JSON lines of one of the two sets.")],
    cache: inputs.CachesOption,
    model: inputs.ModelOption = "smollm2",
    questions: Annotated[int | None, typer.Option(help="The first so many; all by default.", min=1)] = None,
    records: Annotated[
        int | None, typer.Option(help="Lines or pairs left of each context; all by default.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Questions decoded together.", min=1)] = 1,
    dtype: inputs.DtypeOption = None,
    device: inputs.DeviceOption = None,
) -> Iterator[Found]:
    """Ask for one line, or one value, of a long context. Each cache is asked, `dynamic` first.

    \b
    Examples:
        kvcache-plugins eval retrieval --data-file 200_lines.jsonl --cache infinigen --cache h2o
    """
    asked = read_questions(data_file, records)[:questions]
    if not asked:
        raise ValueError(f"`questions`: there is none in {data_file}, or none was asked for")
    loaded, tokenizer = inputs.load_for_evaluation(model, dtype, device)
    factories = harness.cache_factories(cache, loaded)
    yield from loaded_settings(loaded)
    yield Settings(num_questions=len(asked))
    with track_progress(-(-len(asked) // batch_size) * len(factories)) as announce:
        yield from answer_questions(loaded, tokenizer, asked, factories, announce, batch_size)
