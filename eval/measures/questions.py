"""Questions about long contexts, from the files of two sets: LongChat's lines and lost-in-the-middle's pairs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_plugins.console.inputs import read_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A context that ends where the answer begins, and the answer."""

    context: str
    answer: str


def read_questions(path: Path, num_records: int | None = None) -> list[Question]:
    """
    The questions of a JSON-lines file.

    Args:
        path (`Path`): the file.
        num_records (`int`, *optional*):
            Lines, or pairs, that are left of each context: neighbours of the one that is asked for, which keeps its
            place among them. For models to which the whole sets are too hard, however they are read.

    Raises:
        ValueError: if a row is of neither set, or `num_records` is below 1.
    """
    if num_records is not None and num_records < 1:
        raise ValueError(f"`records` has to be at least 1 but is {num_records}")
    rows = [json.loads(line) for line in read_text(path, "data_file").splitlines() if line]
    return [_question(row, path, num_records) for row in rows]


def _around(place: int, total: int, num_records: int | None) -> slice:
    """So many of `total` records, of which the one at `place` stands as far from their start as from that of all."""
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
