"""What a sweep can measure of one cache on one model, each as `{"result": ..., "memory": ..., "stats": ...}`.

The options are those of the measures' own commands. `memory` is of the longest cache, or the last one, at its end.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval.harness.caches import cache_factories
from kvcache_plugins.eval.harness.windows import encode_text, spread_windows
from kvcache_plugins.eval.measures.fidelity import measure_fidelity
from kvcache_plugins.eval.measures.fidelity_report import fidelity_fields
from kvcache_plugins.eval.measures.perplexity import measure_perplexity
from kvcache_plugins.eval.measures.perplexity_report import perplexity_fields
from kvcache_plugins.eval.measures.questions import read_questions
from kvcache_plugins.eval.measures.retrieval import answer_questions
from kvcache_plugins.eval.tasks import find_task


SEED = 42
# Resamplings behind the standard error of a metric that is no mean, such as perplexity
_BOOTSTRAPS = 1000

Found = dict[str, Any]


def measure(
    kind: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: str,
    options: Mapping[str, Any],
    base: Path,
) -> Found:
    """
    One measure of one cache.

    Args:
        kind (`str`): A key of `MEASURES`.
        model, tokenizer: What is measured on.
        cache (`str`): `NAME` or `NAME:key=value,...`.
        options (`Mapping[str, Any]`): Keywords of the measure. An unknown one raises a `ValueError`.
        base (`Path`): Folder that relative paths begin at.
    """
    function = MEASURES[kind]
    accepted = list(inspect.signature(function).parameters)[3:]
    unknown = options.keys() - set(accepted)
    if unknown:
        raise ValueError(f"`{kind}` has no option {', '.join(sorted(unknown))}. It has {', '.join(accepted)}")
    resolved = {key: _resolve(value, base) if _is_path(key, value) else value for key, value in options.items()}
    set_seed(SEED)
    return function(model, tokenizer, cache, **resolved)


def _is_path(key: str, value: Any) -> bool:
    return key.endswith("_file") or (key == "task" and value.endswith(".yaml"))


def _resolve(path: str, base: Path) -> Path:
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        raise ValueError(f"`{path}` names an environment variable that is not set")
    return base / expanded


def _windows(
    tokenizer: PreTrainedTokenizerBase, text_file: Path, num_windows: int, prefix: int, scored: int
) -> list[Any]:
    token_ids, start_ids = encode_text(tokenizer, text_file.read_text(encoding="utf-8"))
    return spread_windows(token_ids, num_windows, prefix, scored, start_ids)


def measure_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: str,
    task: str | Path = "",
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    mode: str = "auto",
    chunk: int = 64,
    check: bool = True,
    apply_chat_template: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Found:
    """A task of lm-eval: of this project (`kv_copa`), of a YAML file, or lm-eval's own."""
    import lm_eval

    from kvcache_plugins.eval.lm_eval_model import KVCacheLM

    named, manager = find_task(task, metadata)
    lm = KVCacheLM(
        model,
        tokenizer=tokenizer,
        cache=cache,
        cache_mode=mode,
        cache_chunk=chunk,
        cache_check=check,
        batch_size=batch_size,
    )
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=[named],
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=_BOOTSTRAPS,
        apply_chat_template=apply_chat_template,
        task_manager=manager,
    )
    ((name, scores),) = results["results"].items()
    metrics = [key for key in scores if "," in key and "_stderr" not in key]
    samples = results["samples"][name]
    used = results["config"]["cache"]
    return {
        "result": {
            "metrics": {key: scores[key] for key in metrics},
            "standard_errors": {key: scores.get(key.replace(",", "_stderr,")) for key in metrics},
            "num_items": len(samples),
            # Of each item, for differences between caches that are far smaller than each one's own error
            "by_item": {
                key: [sample[key.split(",")[0]] for sample in samples]
                for key in metrics
                if all(isinstance(sample.get(key.split(",")[0]), (int, float)) for sample in samples)
            },
            "counters": used["counters"],
        },
        "memory": used["memory_of_longest"],
        "stats": used["stats_of_longest"],
    }


def measure_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: str,
    text_file: Path | None = None,
    windows: int = 8,
    prefix: int = 1024,
    scored: int = 512,
    chunk: int | None = None,
) -> Found:
    """How far a cache's distributions are from the dense cache's: see `fidelity`."""
    cut = _windows(tokenizer, _required(text_file), windows, prefix, scored)
    factories = cache_factories([cache], model)
    fields = fidelity_fields(cache, measure_fidelity(model, cut, factories, prefix_length=prefix, chunk=chunk)[cache])
    return {"result": fields, "memory": fields["memory_at_end"], "stats": fields["stats"]}


def measure_drift(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: str,
    text_file: Path | None = None,
    length: int = 2048,
    windows: int = 1,
    chunk: int = 1,
    stretch: int = 256,
) -> Found:
    """Perplexity against position: see `perplexity`."""
    cut = _windows(tokenizer, _required(text_file), windows, length // 2, length - length // 2)
    factories = cache_factories([cache], model)
    fields = perplexity_fields(cache, measure_perplexity(model, cut, factories, chunk=chunk, stretch=stretch)[cache])
    return {"result": fields, "memory": fields["memory_at_end"], "stats": fields["stats"]}


def measure_retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: str,
    data_file: Path | None = None,
    records: int | None = None,
    questions: int | None = None,
    batch_size: int = 1,
) -> Found:
    """Lines or values found in long contexts: see `retrieval`."""
    asked = read_questions(_required(data_file), records)[:questions]
    factories = cache_factories([cache], model)
    result = answer_questions(model, tokenizer, asked, factories, lambda _: None, batch_size)[cache]
    return {
        "result": {
            "accuracy": result.accuracy,
            "standard_error": result.standard_error,
            "token_accuracy": result.token_accuracy,
            "correct": list(result.correct),
        },
        "memory": None if result.memory is None else memory_fields(result.memory),
        "stats": result.stats,
    }


def _required(path: Path | None) -> Path:
    if path is None:
        raise ValueError("`text_file`, or `data_file` of retrieval, is missing")
    return path


MEASURES: dict[str, Callable[..., Found]] = {
    "task": measure_task,
    "fidelity": measure_windows,
    "perplexity": measure_drift,
    "retrieval": measure_retrieval,
}
