"""Prompts that are read again and again by processes that end: seconds to the first token, and bytes on disk.

Ways are compared: `none` reads every prompt from its first token on, `pickle` has a pickled `DynamicCache` as users
do, others are GEAR caches of a `PromptStore`. Scenarios are prompts, each list of them answered by a process of its
own:

    again        a document, once more, once more with its files out of the page cache, and another document that
                 shares three quarters with it
    questions    a document with one question after another, in one process, and in a second one
    documents    three documents taking turns, a process each
    chat         a conversation whose process ends after every turn

The way `none` takes the same time for every prompt, and a long one: with `unaided` it answers only the first of each
scenario, and rows say how many there are. What a store has given has to be what reading has given, to the last token,
or there is no result.

    kvcache-plugins bench store --text-file FILE --out FILE.json
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from kvcache_plugins.console.inputs import ModelOption, NumThreadsOption, default_device, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.models.reference_model import resolve_model
from kvcache_plugins.registry import check_caches


BASELINES = ("none", "pickle")
_WORKER = "kvcache_plugins.eval.benchmarks.store_process"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Tokens of a document, a question and an answer, and how many questions and turns there are."""

    document: int
    questions: int
    question_tokens: int
    turns: int
    new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """Prompts that one process answers: what they are called, and whether the page cache knows their files."""

    name: str
    prompts: list[list[int]]
    is_cold: bool = False


def _again(text: list[int], sizes: Sizes) -> list[Visit]:
    document, shared = text[: sizes.document], sizes.document * 3 // 4
    other = document[:shared] + text[sizes.document : 2 * sizes.document - shared]
    visits = [Visit(name="first", prompts=[document]), Visit(name="second", prompts=[document])]
    visits.append(Visit(name="second, cold", prompts=[document], is_cold=True))
    return [*visits, Visit(name="shares 3/4", prompts=[other])]


def _questions(text: list[int], sizes: Sizes) -> list[Visit]:
    starts = [sizes.document + number * sizes.question_tokens for number in range(sizes.questions)]
    prompts = [text[: sizes.document] + text[start : start + sizes.question_tokens] for start in starts]
    return [Visit(name="first", prompts=prompts), Visit(name="second", prompts=prompts)]


def _documents(text: list[int], sizes: Sizes) -> list[Visit]:
    documents = [text[start : start + sizes.document] for start in range(0, 3 * sizes.document, sizes.document)]
    return [Visit(name=name, prompts=[each]) for name in ("first", "second") for each in documents]


def _chat(text: list[int], sizes: Sizes) -> list[Visit]:
    ends = range(sizes.question_tokens, sizes.turns * sizes.question_tokens + 1, sizes.question_tokens)
    return [Visit(name="turn", prompts=[text[: sizes.document + end]]) for end in ends]


SCENARIOS: dict[str, Callable[[list[int], Sizes], list[Visit]]] = {
    "again": _again,
    "questions": _questions,
    "documents": _documents,
    "chat": _chat,
}


def benchmark_store(
    text_file: Annotated[Path, typer.Option(help="A text of three documents' tokens at least.")],
    way: Annotated[list[str], typer.Option(help="none, pickle, or a GEAR cache's NAME; repeatable.")] = [
        "none",
        "pickle",
        "gear",
        "gear-4bit",
    ],
    scenario: Annotated[list[str], typer.Option(help="again, questions, documents or chat; repeatable.")] = [
        "again",
        "questions",
        "documents",
        "chat",
    ],
    model: ModelOption = "smollm2",
    document: Annotated[int, typer.Option(help="Tokens of a document.", min=8)] = 8000,
    questions: Annotated[int, typer.Option(help="Questions to a document.", min=1)] = 20,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question, or of a turn.", min=1)] = 32,
    turns: Annotated[int, typer.Option(help="Turns of a chat.", min=1)] = 12,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 16,
    unaided: Annotated[
        int | None, typer.Option(help="Prompts of a scenario that `none` answers at most; all if not given.", min=1)
    ] = None,
    num_threads: NumThreadsOption = None,
) -> dict[str, Any]:
    """Time the first token of prompts that were read before.

    Those who read them are processes that have ended. Without a store, with a pickled DynamicCache, and with a prompt
    store of GEAR caches.

    \b
    Examples:
        kvcache-plugins bench store --text-file book.txt --out store.json
        kvcache-plugins bench store --text-file book.txt --scenario again --way gear --document 2000
    """
    unknown = sorted(set(scenario) - SCENARIOS.keys())
    if unknown:
        raise ValueError(f"`scenario` has to be one of {list(SCENARIOS)} but got {unknown[0]!r}")
    check_caches([each for each in way if each not in BASELINES])
    sizes = Sizes(
        document=document,
        questions=questions,
        question_tokens=question_tokens,
        turns=turns,
        new_tokens=new_tokens,
    )
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    text = tokenizer(read_text(text_file, "text_file")).input_ids
    needed = max(3 * document, document + max(questions, turns) * question_tokens)
    if len(text) < needed:
        raise ValueError(f"the text has {len(text)} tokens, but {needed} are needed")
    rows = []
    for name in scenario:
        for each in way:
            visits = SCENARIOS[name](text, sizes)
            all_prompts = sum(len(visit.prompts) for visit in visits)
            if each == "none" and unaided is not None:
                visits = _first_prompts(visits, unaided)
            for row in _measure(name, each, visits, model, new_tokens, num_threads):
                rows.append({**row, "prompts_of_scenario": all_prompts})
    settings = {"model": model, "document": document, "questions": questions, "question_tokens": question_tokens}
    settings |= {"turns": turns, "new_tokens": new_tokens, "text_file": text_file.name}
    settings |= {"unaided": unaided, "num_threads": num_threads}
    return {"benchmark": "store", **provenance(torch.device(default_device())), "settings": settings, "rows": rows}


def _first_prompts(visits: Sequence[Visit], count: int) -> list[Visit]:
    """Makes the beginnings of visits, `count` prompts in all."""
    kept = []
    for visit in visits:
        prompts = visit.prompts[:count]
        count -= len(prompts)
        if prompts:
            kept.append(replace(visit, prompts=prompts))
    return kept


def _measure(
    scenario: str, way: str, visits: Sequence[Visit], model: str, new_tokens: int, num_threads: int | None
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    known: dict[tuple[int, ...], list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for visit in visits:
            if visit.is_cold:
                _forget_pages(Path(folder))
            request: dict[str, Any] = {"model": model, "way": way, "folder": folder, "prompts": visit.prompts}
            request |= {"new_tokens": new_tokens, "num_threads": num_threads}
            for number, answer in enumerate(_run_process(request)):
                tokens, prompt = answer.pop("tokens"), tuple(visit.prompts[number])
                if known.setdefault(prompt, tokens) != tokens and way not in BASELINES:
                    raise RuntimeError(f"`{way}` has answered a prompt of `{scenario}` in two ways: one is wrong")
                row = {"scenario": scenario, "way": way, "visit": visit.name, **answer, "load": os.getloadavg()[0]}
                rows.append({**row, "disk_bytes": _disk_bytes(Path(folder))})
                typer.echo(describe(rows[-1]))
    return rows


def describe(row: dict[str, Any]) -> str:
    """One line of a result."""
    return (
        f"{row['scenario']:<10} {row['way']:<12} {row['visit']:<13} "
        f"{row['num_saved']:>6} of {row['num_tokens']} known, "
        f"first token after {row['first_token_s']:8.2f} s ({row['first_token_cpu_s']:.2f} s of CPU), "
        f"{row['disk_bytes'] / 1e6:8.1f} MB on disk"
    )


def _run_process(request: dict[str, Any]) -> list[dict[str, Any]]:
    # The working directory may hold folders that are called as packages are
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", _WORKER]
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"a process that answers prompts has failed: {done.stderr.strip().splitlines()[-1:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


def _forget_pages(folder: Path) -> None:
    """Has the system's page cache forget files, which are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
