"""Prompts that are read again and again by processes that end: seconds to the first token, and bytes on disk.

Ways are compared: `none` reads every prompt from its first token on, `pickle` has a pickled `DynamicCache` as users
do, others are GEAR caches of a `PromptStore`. Scenarios are prompts, each list of them answered by a process of its
own:

    again        a document, once more, once more with its files out of the page cache, and another document that
                 shares three quarters with it
    questions    a document with one question after another, in one process, and in a second one

The way `none` takes the same time for every prompt, and a long one: with `unaided` it answers only the first of each
scenario, and rows say how many there are. What a store has given has to be what reading has given, to the last token,
or there is no result. A process that answers prompts is this module, run by itself.
"""

import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from kvcache_plugins import PromptStore
from kvcache_plugins.console.inputs import ModelOption, NumThreadsOption, default_device, read_text
from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.rows import Content, Found
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.reference_model import load_model, resolve_model
from kvcache_plugins.option_checks import check_choice
from kvcache_plugins.registry import check_caches


SCENARIOS = ("again", "questions")
BASELINES = ("none", "pickle")
# More than a block of a store, so that compressed states are attended to
_WARM_UP = 300


@dataclass(frozen=True, slots=True)
class Visit:
    """Prompts that one process answers: what they are called, and whether the page cache knows their files."""

    name: str
    prompts: list[list[int]]
    is_cold: bool = False


def visits_of(scenario: str, text: list[int], document: int, questions: int, question_tokens: int) -> list[Visit]:
    """Cuts the prompts of a scenario out of a text."""
    own = text[:document]
    if scenario == "questions":
        starts = range(document, document + questions * question_tokens, question_tokens)
        prompts = [own + text[start : start + question_tokens] for start in starts]
        return [Visit("first", prompts), Visit("second", prompts)]
    shared = document * 3 // 4
    other = own[:shared] + text[document : 2 * document - shared]
    named = [Visit("first", [own]), Visit("second", [own]), Visit("second, cold", [own], is_cold=True)]
    return [*named, Visit("shares 3/4", [other])]


@benchmark("store")
def benchmark_store(
    text_file: Annotated[Path, typer.Option(help="A text of two documents' tokens at least.")],
    way: Annotated[list[str], typer.Option(help="none, pickle, or a GEAR cache's NAME; repeatable.")] = [
        "none",
        "pickle",
        "gear",
        "gear-4bit",
    ],
    scenario: Annotated[list[str], typer.Option(help="again or questions; repeatable.")] = ["again", "questions"],
    model: ModelOption = "smollm2",
    document: Annotated[int, typer.Option(help="Tokens of a document.", min=8)] = 8000,
    questions: Annotated[int, typer.Option(help="Questions to a document.", min=1)] = 20,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question.", min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 16,
    unaided: Annotated[
        int | None, typer.Option(help="Prompts of a scenario that `none` answers at most; all if not given.", min=1)
    ] = None,
    num_threads: NumThreadsOption = None,
) -> Iterator[Found]:
    """Time the first token of prompts that were read before.

    Those who read them are processes that have ended. Without a store, with a pickled DynamicCache, and with a prompt
    store of GEAR caches.

    \b
    Examples:
        kvcache-plugins bench store --text-file book.txt --out store.json
        kvcache-plugins bench store --text-file book.txt --scenario again --way gear --document 2000
    """
    for each in scenario:
        check_choice("scenario", each, SCENARIOS)
    check_caches([each for each in way if each not in BASELINES])
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    text = tokenizer(read_text(text_file, "text_file")).input_ids
    needed = document + max(document, questions * question_tokens)
    if len(text) < needed:
        raise ValueError(f"the text has {len(text)} tokens, but {needed} are needed")
    yield Content(device=torch.device(default_device()))
    for name in scenario:
        for each in way:
            visits = visits_of(name, text, document, questions, question_tokens)
            all_prompts = sum(len(visit.prompts) for visit in visits)
            left = unaided if each == "none" and unaided is not None else all_prompts
            request = {"model": model, "way": each, "new_tokens": new_tokens, "num_threads": num_threads}
            kept = []
            for visit in visits:
                kept.append(replace(visit, prompts=visit.prompts[:left]))
                left -= len(kept[-1].prompts)
            for row in _measure(name, request, [visit for visit in kept if visit.prompts]):
                yield {**row, "prompts_of_scenario": all_prompts}


def _measure(scenario: str, request: dict[str, Any], visits: Sequence[Visit]) -> Iterator[dict[str, Any]]:
    known: dict[tuple[int, ...], list[int]] = {}
    way = request["way"]
    with tempfile.TemporaryDirectory() as folder:
        for visit in visits:
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            for path in files if visit.is_cold else ():
                # The system's page cache forgets what is on the disk already
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            answers = _run_process({**request, "folder": folder, "prompts": visit.prompts})
            for prompt, answer in zip(visit.prompts, answers, strict=True):
                tokens = answer.pop("tokens")
                if known.setdefault(tuple(prompt), tokens) != tokens and way not in BASELINES:
                    raise RuntimeError(f"`{way}` has answered a prompt of `{scenario}` in two ways: one is wrong")
                say(f"{scenario}, {way}, {visit.name}: first token after {answer['first_token_s']:.2f} s")
                row = {"scenario": scenario, "way": way, "visit": visit.name, **answer, "load": os.getloadavg()[0]}
                disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
                yield {**row, "disk_bytes": disk}


def _run_process(request: dict[str, Any]) -> list[dict[str, Any]]:
    # The working directory may hold folders that are called as packages are
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "kvcache_plugins.eval.benchmarks.store"]
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"a process that answers prompts has failed: {done.stderr.strip().splitlines()[-1:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


# What a process that answers prompts does


class FirstToken(StoppingCriteria):
    """Notes when the first token is there, and stops nothing."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.cpu_seconds: float | None = None
        self._started = time.perf_counter(), time.process_time()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        if self.seconds is None:
            self.seconds = time.perf_counter() - self._started[0]
            self.cpu_seconds = time.process_time() - self._started[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def answer_prompts(request: dict[str, Any]) -> list[dict[str, Any]]:
    """
    Answers prompts: seconds to the first token of each, its tokens, and how many of it did not have to be read.

    Args:
        request (`dict`): `model`, `way`, `folder`, `prompts` (token ids), `new_tokens`, `num_threads`.
    """
    if request["num_threads"] is not None:
        torch.set_num_threads(request["num_threads"])
    model, _ = load_model(request["model"])
    # What is compiled, loaded or allocated the first time is no prompt's own
    with tempfile.TemporaryDirectory() as other:
        _answer(model, request["way"], Path(other), torch.tensor([request["prompts"][0][:_WARM_UP]]), 2)
    folder, count = Path(request["folder"]), request["new_tokens"]
    return [_answer(model, request["way"], folder, torch.tensor([each]), count) for each in request["prompts"]]


def _answer(
    model: PreTrainedModel, way: str, folder: Path, input_ids: torch.Tensor, new_tokens: int
) -> dict[str, Any]:
    first = FirstToken()
    cache, num_saved = _cache_of(model, way, folder, input_ids)
    tokens = model.generate(  # type: ignore[operator]
        input_ids,
        **as_argument(cache),
        max_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([first]),
    )
    total = time.perf_counter()
    if way == "pickle":
        with (folder / "cache.pickle").open("wb") as file:
            pickle.dump((tokens[:, : cache.get_seq_length()], copy.deepcopy(cache)), file)
    return {
        "first_token_s": first.seconds,
        "first_token_cpu_s": first.cpu_seconds,
        "keep_s": time.perf_counter() - total,
        "num_tokens": input_ids.shape[1],
        "num_saved": num_saved,
        "tokens": tokens[0, input_ids.shape[1] :].tolist(),
    }


def _cache_of(model: PreTrainedModel, way: str, folder: Path, input_ids: torch.Tensor) -> tuple[Cache, int]:
    if way not in BASELINES:
        store = PromptStore(folder)
        made = store.cache_for(model, input_ids, way)
        num_saved = made.get_seq_length()
        store.prefill(model, made, input_ids)
        return made, num_saved
    path = folder / "cache.pickle"
    if way == "pickle" and path.exists():
        with path.open("rb") as file:
            known, cache = pickle.load(file)
        length = min(known.shape[1], input_ids.shape[1] - 1)
        num_same = int((known[0, :length] == input_ids[0, :length]).long().cumprod(dim=0).sum())
        if num_same:
            if num_same < cache.get_seq_length():
                cache.crop(num_same - cache.get_seq_length())
            return cache, num_same
    return DynamicCache(config=model.config), 0


if __name__ == "__main__":
    found = answer_prompts(json.load(sys.stdin))
    print(json.dumps(found))  # noqa: T201
