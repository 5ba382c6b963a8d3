"""Sweeps: caches x models x measures from a YAML file, with a JSON file for each run.

    models: [smollm2]
    caches: [dynamic, gear-2bit, "gear-2bit:rank=8"]
    out: results/small
    measures:
      copa: {task: kv_copa, limit: 200}
      book: {fidelity: {text_file: book.txt, windows: 4, prefix: 1024, scored: 256}}
      drift: {perplexity: {text_file: book.txt, length: 2048, chunk: 64}}
      pairs: {retrieval: {data_file: pairs.jsonl, records: 10, questions: 24}}

Paths are relative to the YAML file and may name environment variables. A run with a JSON file is not repeated, and an
interrupted run writes none, so that a sweep can be continued. Options of a measure are those of its command. A file
has `result`, and `memory` and `stats` of the longest or last cache at its end.
"""

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from transformers import set_seed

from kvcache_plugins.console.inputs import LoadedModel, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance, write_json
from kvcache_plugins.registry import check_caches

from .benchmark import Result
from .measures import answers
from .measures.commands import evaluate_fidelity, evaluate_perplexity, evaluate_retrieval
from .tasks import find_task


SEED = 42
# Resamplings behind the standard error of a metric that is no mean, such as perplexity
_BOOTSTRAPS = 1000
_NEEDED = {"models", "caches", "out", "measures"}
_FIELDS = _NEEDED | {"dtype", "device"}
# Options of measures that are a sweep's own
_OF_ALL = {"cache", "model", "dtype", "device", "seed"}

Found = dict[str, Any]


def measure_task(
    cache: Sequence[str],
    model: str | LoadedModel,
    task: str | Path,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    mode: str = "auto",
    chunk: int = 64,
    check: bool = True,
    apply_chat_template: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Iterator[Found]:
    """Run a task of lm-eval: of this project (`kv_copa`), of a YAML file, or lm-eval's own."""
    import lm_eval

    from .lm_eval_model import KVCacheLM

    network, tokenizer = load_for_evaluation(model)
    named, manager = find_task(task, metadata)
    own: dict[str, Any] = {"cache_mode": mode, "cache_chunk": chunk, "cache_check": check, "batch_size": batch_size}
    results = lm_eval.simple_evaluate(
        model=KVCacheLM(network, tokenizer=tokenizer, cache=cache[0], **own),
        tasks=[named],
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=_BOOTSTRAPS,
        apply_chat_template=apply_chat_template,
        task_manager=manager,
    )
    ((name, scores),) = results["results"].items()
    metrics = [key for key in scores if "," in key and "_stderr" not in key]
    used, samples = results["config"]["cache"], results["samples"][name]
    by_item: dict[str, list[Any]] = {key: [] for key in metrics}
    # A task with several filters has a sample of each item by each of them
    for sample, key in product(samples, metrics):
        metric, _, filtered_by = key.partition(",")
        by_item[key] += [sample.get(metric)] if sample["filter"] == filtered_by else []
    yield {
        "metrics": {key: scores[key] for key in metrics},
        "standard_errors": {key: scores.get(key.replace(",", "_stderr,")) for key in metrics},
        "num_items": len({sample["doc_id"] for sample in samples}),
        # Figures of each item: differences between caches are far smaller than each one's own error
        "by_item": {key: own for key, own in by_item.items() if all(isinstance(each, (int, float)) for each in own)},
        "counters": used["counters"],
        "memory_at_end": used["memory_of_longest"],
        "stats": used["stats_of_longest"],
    }


MEASURES: dict[str, Callable[..., Any]] = {
    "task": measure_task,
    "fidelity": evaluate_fidelity,
    "perplexity": evaluate_perplexity,
    "retrieval": evaluate_retrieval,
    "context": answers.measure_tasks,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a sweep, with all that its result depends on. `name` is the measure's, `kind` is in `MEASURES`."""

    model: str
    cache: str
    name: str
    kind: str
    options: Mapping[str, Any]
    dtype: str | None = None
    device: str | None = None

    @property
    def label(self) -> str:
        """Name of the run, which `--only` is compared with."""
        return f"{self.name}/{self.model}/{self.cache}"

    def file_name(self) -> str:
        """Make a name with a digest of all settings."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        words = (self.name, Path(self.model).name, self.cache)
        slug = "-".join("".join(c if c.isalnum() or c in "-." else "_" for c in word) for word in words)
        return f"{slug}-{digest}.json"

    def measure(self, model: LoadedModel, base: Path) -> Found:
        """Measure the cache; relative paths begin at `base`. An unknown option raises a `ValueError`."""
        # A benchmark without its command: its rows alone
        function = inspect.unwrap(MEASURES[self.kind])
        accepted = {key: each for key, each in inspect.signature(function).parameters.items() if key not in _OF_ALL}
        unknown = self.options.keys() - accepted.keys()
        if unknown:
            raise ValueError(f"`{self.kind}` has no option {', '.join(sorted(unknown))}. It has {', '.join(accepted)}")
        missing = [key for key, each in accepted.items() if each.default is each.empty and key not in self.options]
        if missing:
            raise ValueError(f"`{self.kind}` needs `{missing[0]}`, which is missing")
        options = dict(self.options)
        for key, value in options.items():
            if key.endswith("_file") or (key == "task" and value.endswith(".yaml")):
                expanded = os.path.expandvars(value)
                if "$" in expanded:
                    raise ValueError(f"`{value}` names an environment variable that is not set")
                options[key] = base / expanded
        set_seed(SEED)
        result = Result(self.kind, {})
        for found in function(cache=[self.cache], model=model, **options):
            result.take(found)
        (row,) = result.rows
        return {"result": row, "memory": row["memory_at_end"], "stats": row["stats"]}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Content of a sweep's file: its runs by model, the folder of results, and the base folder of relative paths."""

    runs: tuple[Run, ...]
    out: Path
    base: Path

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Read a YAML file; a `ValueError` names a missing, unknown or wrong entry."""
        try:
            found = yaml.safe_load(read_text(path, "config"))
        except yaml.YAMLError as error:
            raise ValueError(f"`config`: {path} is no YAML ({error})") from error
        content = found if isinstance(found, dict) else {}
        unknown, missing = content.keys() - _FIELDS, _NEEDED - content.keys()
        if unknown or missing:
            named = ", ".join(f"`{name}`" for name in sorted(unknown or missing))
            what = "unknown" if unknown else "missing"
            raise ValueError(f"{path}: {what} {named}. Known: {', '.join(sorted(_FIELDS))}")
        for name, kind, words in (
            ("models", list, "a list"),
            ("caches", list, "a list"),
            ("measures", dict, "a mapping"),
        ):
            if not isinstance(content[name], kind):
                raise ValueError(f"{path}: `{name}` has to be {words} but is {content[name]!r}")
        check_caches(content["caches"])
        measures = {name: _parse_measure(name, fields) for name, fields in content["measures"].items()}
        more = {key: content.get(key) for key in ("dtype", "device")}
        runs = tuple(
            Run(model=model, cache=cache, name=name, kind=kind, options=options, **more)
            for model in content["models"]
            for name, (kind, options) in measures.items()
            for cache in content["caches"]
        )
        return cls(runs=runs, out=path.parent / content["out"], base=path.parent)

    def pending(self, only: str = "*", again: bool = False) -> list[Run]:
        """List runs whose labels match, without those that have a result."""
        chosen = [run for run in self.runs if fnmatchcase(run.label, only)]
        if not chosen:
            labels = ", ".join(run.label for run in self.runs[:3])
            raise ValueError(f"`only` is `{only}`, which matches no run. There are, for instance, {labels}")
        return [run for run in chosen if again or not (self.out / run.file_name()).is_file()]


def _parse_measure(name: str, fields: Any) -> tuple[str, dict[str, Any]]:
    kinds = [kind for kind in MEASURES if isinstance(fields, dict) and kind in fields]
    if len(kinds) != 1:
        raise ValueError(f"measure `{name}` has to have one of {', '.join(MEASURES)}, but has {fields}")
    (kind,) = kinds
    rest = {key: value for key, value in fields.items() if key != kind}
    if kind == "task":
        return kind, {"task": fields[kind], **rest}
    if rest or not isinstance(fields[kind], dict):
        raise ValueError(f"measure `{name}`: the options of `{kind}` stand in it, as `{kind}: {{key: value}}`")
    return kind, fields[kind]


def run_sweep(sweep: Sweep, runs: list[Run], announce: Callable[[str], None]) -> Iterator[tuple[Run, str | None]]:
    """Announce and run every run, loading each model once; yield each with its error, if it has failed."""
    loaded: LoadedModel | None = None
    name, start = "", time.perf_counter()
    for number, run in enumerate(runs):
        left = (time.perf_counter() - start) / number * (len(runs) - number) / 60 if number else None
        hint = "" if left is None else f", about {left:.0f} min left"
        announce(f"{number + 1} of {len(runs)}: {run.label}{hint}")
        if loaded is None or name != run.model:
            # Free the last model first
            loaded = None
            loaded, name = load_for_evaluation(run.model, run.dtype, run.device), run.model
        started = time.perf_counter()
        try:
            found = run.measure(loaded, sweep.base)
        except Exception as error:
            # Caches and kernels of other projects raise errors of any kind; the other runs go on
            yield run, f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        seconds, origin = time.perf_counter() - started, provenance(loaded[0].device)
        path = sweep.out / run.file_name()
        write_json(path, {"benchmark": "sweep", **origin, "settings": asdict(run), "seconds": seconds, **found})
        yield run, None
