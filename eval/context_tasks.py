"""Tasks whose answers need much of their context, or are long, made from a seed.

Records and tables to be rewritten, and many needles at once, are from "KV Cache Offloading for Context-Intensive
Tasks" (arXiv 2604.08426), which doubts that selected tokens are enough for them. Variables to track and common words
are RULER's (arXiv 2404.06654). Long answers show accumulating errors, as each line follows from the one before.

Lines of an answer are scored from a place on, and earlier lines are part of the context, so that an answer of a
thousand tokens need not be decoded from its first token on.
"""

import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple


class Question(NamedTuple):
    """A context that ends where the answer begins, and the answer."""

    context: str
    answer: str


# A prompt and the lines of the whole answer to it
_Made = tuple[str, list[str]]

_JOBS = ("baker", "driver", "farmer", "nurse", "painter", "pilot", "singer", "smith", "tailor", "teacher")
_SENTENCES = (
    "{name} is {age} years old, lives in {town} and works as a {job}.",
    "In {town} there is a {job} of {age} called {name}.",
    "{name}, a {job} from {town}, turned {age} this year.",
)
_FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "Rain came in from the sea before noon.",
    "Nobody knew when the train would leave.",
)
_NEEDLE_EVERY, _CHAIN_EVERY, _HOPS = 5, 24, 4


def _word(draw: random.Random, syllables: int = 3) -> str:
    return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(syllables))


def _people(draw: random.Random, count: int) -> list[dict[str, str | int]]:
    return [
        {
            "name": _word(draw).title(),
            "age": draw.randrange(18, 90),
            "town": _word(draw, 2).title(),
            "job": draw.choice(_JOBS),
        }
        for _ in range(count)
    ]


def make_records(draw: random.Random, size: int) -> _Made:
    """Make people described in prose, to be written as JSON lines."""
    people = _people(draw, size + 1)
    (example, first), *rest = [(draw.choice(_SENTENCES).format_map(each), f"{json.dumps(each)}\n") for each in people]
    text = " ".join(sentence for sentence, _ in rest)
    head = f"Write every person of the text as a line of JSON.\n\nText: {example}\nJSON:\n{first}"
    return f"{head}\nText: {text}\nJSON:\n", [line for _, line in rest]


def make_needles(draw: random.Random, size: int) -> _Made:
    """Make codes hidden among other sentences; the question asks for all, in another order."""
    codes = [(_word(draw).title(), draw.randrange(1000, 10_000)) for _ in range(max(1, size // _NEEDLE_EVERY))]
    sentences = [draw.choice(_FILLER) for _ in range(size - len(codes))]
    for name, code in codes:
        sentences.insert(draw.randrange(len(sentences) + 1), f"The code of {name} is {code}.")
    draw.shuffle(codes)
    lines = [f"{name}: {code}\n" for name, code in codes]
    names = ", ".join(name for name, _ in codes)
    return f"{' '.join(sentences)}\n\nThe codes of {names} are:\n", lines


def make_table(draw: random.Random, size: int, html: bool = True) -> _Made:
    """Make a table, in HTML or tab-separated, to be written as tab-separated values."""
    people = _people(draw, size)
    head, rows = list(people[0]), [[str(cell) for cell in each.values()] for each in people]
    heading, *lines = ["\t".join(row) + "\n" for row in (head, *rows)]
    if not html:
        return f"A table:\n\n{heading}{''.join(lines)}\nThe same table once more:\n\n{heading}", lines
    cells = [f"<th>{'</th><th>'.join(head)}</th>", *(f"<td>{'</td><td>'.join(row)}</td>" for row in rows)]
    text = "\n".join(f"<tr>{each}</tr>" for each in cells)
    return f"<table>\n{text}\n</table>\n\nThe same table as tab-separated values:\n\n{heading}", lines


def make_variables(draw: random.Random, size: int) -> _Made:
    """Make chains of variables among other sentences; all that have a chain's value are asked for, of every chain."""
    sentences: list[str] = []
    lines = []
    for value in draw.sample(range(10_000, 100_000), max(1, size // _CHAIN_EVERY)):
        names = [_word(draw).upper() for _ in range(_HOPS + 1)]
        given = [f"VAR {names[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in pairwise(names))]
        # In the order of the chain, with others between them
        places = sorted(draw.randrange(len(sentences) + 1) for _ in given)
        for offset, (place, sentence) in enumerate(zip(places, given, strict=True)):
            sentences.insert(place + offset, sentence)
        lines.append(f"{value}: {' '.join(names)}\n")
    for _ in range(size - len(sentences)):
        sentences.insert(draw.randrange(len(sentences) + 1), draw.choice(_FILLER))
    return f"{' '.join(sentences)}\n\nThe variables that have each value, in order:\n\n", lines


def make_words(draw: random.Random, size: int) -> _Made:
    """Make words drawn with frequencies of Zipf's law; the question asks for the three most common."""
    known = [_word(draw) for _ in range(30)]
    said = draw.choices(known, [1 / rank**1.5 for rank in range(1, len(known) + 1)], k=size)
    common = " ".join(word for word, _ in Counter(said).most_common(3))
    return f"{' '.join(said)}\n\nThe three most common words, the most common first, are:", [f" {common}\n"]


def make_states(draw: random.Random, size: int) -> _Made:
    """Make swaps of what five cups hold, to be followed step by step: each line is the one before, but for a swap."""
    held, lines, swaps = ["ball", "coin", "key", "ring", "shell"], [], []
    draw.shuffle(held)
    start = " ".join(held)
    for step in range(1, size + 1):
        one, other = draw.sample(range(len(held)), 2)
        held[one], held[other] = held[other], held[one]
        swaps.append(f"{step}. swap {one + 1} and {other + 1}\n")
        lines.append(f"{step}. {' '.join(held)}\n")
    return f"Five cups in a row hold: {start}\n\n{''.join(swaps)}\nThe cups after each swap:\n\n0. {start}\n", lines


def make_chain_of_thought(rows: Sequence[Mapping[str, str]], draw: random.Random, size: int) -> _Made:
    """Make worked examples out of rows with `question` and `answer`, GSM8K's, and ask for the last one's answer."""
    *examples, last = draw.sample(rows, min(size, len(rows)))
    shown = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in examples)
    return f"{shown}Question: {last['question']}\nAnswer: ", f"{last['answer']}\n".splitlines(keepends=True)


TASKS: dict[str, Callable[[random.Random, int], _Made]] = {
    "records": make_records,
    "needles": make_needles,
    "table": make_table,
    "copying": partial(make_table, html=False),
    "variables": make_variables,
    "words": make_words,
}
LONG_ANSWERS: dict[str, Callable[[random.Random, int], _Made]] = {"states": make_states}


def make_sample(
    task: str,
    count_tokens: Callable[[str], int],
    length: int,
    scored: int,
    place: float = 0.5,
    seed: int = 42,
    rows: Sequence[Mapping[str, str]] = (),
) -> Question:
    """
    Make a sample of a task: the largest context of at most `length` tokens, and the lines of the answer from the share
    `place` (0 to 1) of it on: as many whole lines as fit in `scored` tokens, at least one. Raise a `ValueError` if no
    context is so short, or if the task is unknown (`chain_of_thought` needs `rows`).
    """
    known: dict[str, Callable[[random.Random, int], _Made]] = TASKS | LONG_ANSWERS
    if rows:
        known["chain_of_thought"] = partial(make_chain_of_thought, rows)
    if task not in known:
        raise ValueError(f"`{task}` is no task; there are {', '.join(known)}, with `data_file` `chain_of_thought`")

    def make(size: int) -> tuple[str, list[str]]:
        prompt, lines = known[task](random.Random(f"{task} {seed}"), size)
        start = int(place * len(lines))
        return prompt + "".join(lines[:start]), lines[start:]

    size = bisect_right(range(1, length), length, key=lambda each: count_tokens(make(each)[0]))
    if size == 0:
        raise ValueError(f"`length`: nothing of `{task}` has as few as {length} tokens")
    context, lines = make(size)
    held = bisect_right(range(1, len(lines) + 1), scored, key=lambda each: count_tokens("".join(lines[:each])))
    return Question(context, "".join(lines[: max(held, 1)]))
