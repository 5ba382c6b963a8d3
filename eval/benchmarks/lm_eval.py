"""lm-eval's own model beside `kvcache`, on the requests of one task, taking turns: the same scores, and how fast.

With the dense cache both have to score alike, in every mode; with any other cache the difference is what the cache
costs. Tasks of log-likelihoods only: multiple choice and rolling perplexity.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console.display import Announce, track_progress
from kvcache_plugins.console.inputs import CachesOption, DeviceOption, DtypeOption, ModelOption, load_for_evaluation
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings
from kvcache_plugins.eval.harness import spread, take_turns, time_call
from kvcache_plugins.eval.rows import Found
from kvcache_plugins.eval.tasks import find_task


OWN = "hf"


def build_requests(task: str, limit: int, num_fewshot: int | None) -> tuple[str, list[Any]]:
    """
    The requests of a task's first items.

    Args:
        task (`str`): A name of this project's tasks, a YAML file, or a name of lm-eval's.
        limit (`int`): Items.
        num_fewshot (`int`, *optional*): Examples before each; the task's own number by default.

    Returns:
        What the model is asked for (`loglikelihood` or `loglikelihood_rolling`), and the requests.
    """
    named, manager = find_task(task)
    (built,) = manager.load([named])["tasks"].values()
    if num_fewshot is not None:
        built.set_config("num_fewshot", num_fewshot)
    built.set_fewshot_seed(1234)
    built.build_all_requests(limit=limit, rank=0, world_size=1)
    kinds = {each.request_type for each in built.instances}
    if len(kinds) != 1 or not kinds <= {"loglikelihood", "loglikelihood_rolling"}:
        raise ValueError(f"`task` has to ask for log-likelihoods, but {task} asks for {', '.join(sorted(kinds))}")
    return kinds.pop(), list(built.instances)


def _log_likelihoods(answers: Sequence[Any]) -> list[float]:
    return [float(each[0] if isinstance(each, tuple) else each) for each in answers]


def _picks(requests: Sequence[Any], scores: Sequence[float]) -> list[int]:
    """Of every item the number of its likeliest choice."""
    by_item: dict[int, list[tuple[int, float]]] = {}
    for request, score in zip(requests, scores, strict=True):
        by_item.setdefault(request.doc_id, []).append((request.idx, score))
    return [max(choices, key=lambda choice: choice[1])[0] for choices in by_item.values()]


def compare_models(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    requests: list[Any],
    caches: Sequence[str],
    modes: Sequence[str],
    *,
    rounds: int,
    batch_size: int,
    max_length: int | None,
    announce: Announce,
) -> Iterator[Found]:
    """Yields a row for lm-eval's model and for each cache and mode: seconds, and how far scores are from the first."""
    from lm_eval.models.huggingface import HFLM

    from kvcache_plugins.eval.lm_eval_model import KVCacheLM

    common: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size, "max_length": max_length}
    models: dict[str, Any] = {OWN: HFLM(model, **common)}
    for cache in caches:
        for mode in modes:
            models[f"{cache}, {mode}"] = KVCacheLM(model, cache=cache, cache_mode=mode, cache_check=False, **common)
    scores: dict[str, list[float]] = {}

    def answer(name: str, number: int) -> None:
        announce(f"round {number + 1} of {rounds}: {name}")
        scores[name] = _log_likelihoods(getattr(models[name], kind)(requests, disable_tqdm=True))

    functions = {name: partial(answer, name) for name in models}
    seconds = take_turns(functions, partial(time_call, device=model.device), rounds)
    picks = _picks(requests, scores[OWN])
    for name in models:
        timing = spread(seconds[name])
        own = _picks(requests, scores[name])
        differences = [abs(one - other) for one, other in zip(scores[name], scores[OWN], strict=True)]
        yield {
            "model": name,
            **timing,
            "rounds_s": seconds[name],
            "speed_against_hf": spread(seconds[OWN])["median_s"] / timing["median_s"],
            "largest_difference": max(differences),
            "largest_relative_difference": max(
                difference / abs(score) for difference, score in zip(differences, scores[OWN], strict=True)
            ),
            "same_picks": sum(one == other for one, other in zip(own, picks, strict=True)),
            "num_items": len(picks),
        }


@benchmark("lm-eval", "{model} on {task}, medians of {rounds}")
def benchmark_lm_eval(
    task: Annotated[str, typer.Option(help="A task of log-likelihoods: kv_piqa, a YAML file, or one of lm-eval's.")],
    cache: CachesOption = ["dynamic"],
    mode: Annotated[list[str], typer.Option(help="Of `cache_mode`; repeatable.")] = ["auto"],
    model: ModelOption = "smollm2",
    limit: Annotated[int, typer.Option(help="Items.", min=1)] = 50,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each; the task's own by default.", min=0)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Of both models.", min=1)] = 1,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a window; the model's by default.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Runs of every model, taking turns.", min=1)] = 3,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> Iterator[Found]:
    """lm-eval's own model beside `kvcache`. Seconds on one task, and the largest difference of their scores.

    \b
    Examples:
        kvcache-plugins bench lm-eval --task kv_openbookqa --limit 50
        kvcache-plugins bench lm-eval --task kv_copa --limit 200 --mode prefix --mode chunk --mode decode --rounds 1
    """
    kind, requests = build_requests(task, limit, num_fewshot)
    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    yield from loaded_settings(loaded)
    sizes: dict[str, Any] = {"rounds": rounds, "batch_size": batch_size, "max_length": max_length}
    with track_progress(rounds * (1 + len(cache) * len(mode))) as announce:
        yield from compare_models(loaded, tokenizer, kind, requests, cache, mode, **sizes, announce=announce)
