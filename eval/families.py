"""Caches held against `DynamicCache` on a tiny random model of every decoder family that Transformers has.

Everything goes through `generate`, as a model's own way of counting positions and making masks is part of what has to
work. Tokens are those that the dense cache picks: a cache that loses precision is compared logit by logit along the
same text, not where one other token leads to. A distance between logits is measured in that of the same tokens after
another prompt: 0 is the dense cache's own, 1 is as far off as knowing nothing of the prompt.

Each family is tried in a process of its own: a model that hangs, or takes its process along, costs its own row and
nothing else. Processes are forked where that is possible: PyTorch and Transformers are loaded once, and a cache may be
made by any function, of which nothing has to be sent.
"""

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from logging import CRITICAL
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, Cache, DynamicCache, GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache

from .benchmark import benchmark
from .rows import Found, Settings
from .small_configs import small_config


Status = Literal["works", "reads dense", "refuses", "fails"]
CacheMaker = Callable[[PreTrainedModel], Cache]

PROMPT_LENGTH, NUM_NEW = 80, 20
# Of the shorter one of two prompts
_SHORT_LENGTH = 67
_TURN_LENGTH = 12
_NUM_MORE = 6
# Less than this share of the logits' spread, and what is measured in it would be rounding
_LEAST_CONTROL = 1e-3
# Rounding of another order of sums, carried through a few layers; and what 8 bits may change: a lost token or a wrong
# position changes more
_EXACT, _LOSSY = 0.02, 0.1
# Known to run in a second
_FIRST = "llama"
# What code runs into that was not made for a model
CAUGHT = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(RuntimeError, StrictDataclassError, TypeError, ValueError),
)


class Case(NamedTuple):
    """A cache that is tried: its maker, and how far its logits may be, of the distance that another prompt's are."""

    make_cache: CacheMaker
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """An answer of a model, why it refuses or fails, and its largest distance from the dense cache's logits."""

    status: Status
    detail: str = ""
    distance: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyResult:
    """A family by its `model_type`, why `DynamicCache` does not run it if so, and outcomes by cache if it does."""

    family: str
    dense: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict)


class Run(NamedTuple):
    """Tokens `[batch, new tokens]`, their logits `[batch, new tokens, vocabulary]`, and sides read dense since."""

    tokens: torch.Tensor
    logits: torch.Tensor
    dense_reads: int


class _Forced(LogitsProcessor):
    """Makes `generate` pick given tokens, and notes what a cache has read dense when the prompt was through."""

    def __init__(self, tokens: torch.Tensor | None, cache: Cache):
        self.tokens, self.cache = tokens, cache
        self.step = self.reads_of_prompt = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.step == 0:
            self.reads_of_prompt = dense_reads(self.cache)
        step, self.step = self.step, self.step + 1
        if self.tokens is None:
            return scores
        return torch.full_like(scores, -torch.inf).scatter(1, self.tokens[:, step, None], 0.0)


def dense_reads(cache: Cache) -> int:
    """Counts how often a cache says that it has made a layer's side dense; 0 of one that says nothing."""
    stats = getattr(cache, "stats", None)
    return int(stats().get("dense_reads", 0)) if callable(stats) else 0


def prompt(model: PreTrainedModel, length: int, seed: int) -> torch.Tensor:
    """Draws random tokens `[1, length]`, none of them special."""
    vocab_size = min(model.config.get_text_config(decoder=True).vocab_size, 97)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab_size - 1, (1, length), generator=generator)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    cache: Cache,
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    num_new: int,
    forced: torch.Tensor | None,
) -> Run:
    """Generates tokens after a prompt `[batch, length]`: those that are `forced`, or the likeliest."""
    processor = _Forced(forced, cache)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "output_logits": True}
    model.generation_config = GenerationConfig(
        max_new_tokens=num_new, min_new_tokens=num_new, return_dict_in_generate=True, **options
    )
    output = model.generate(  # type: ignore[operator]
        tokens,
        attention_mask=torch.ones_like(tokens) if mask is None else mask,
        **as_argument(cache),
        logits_processor=[processor],
    )
    if cache.get_seq_length() != tokens.shape[1] + num_new - 1:
        raise ValueError(f"its cache holds {cache.get_seq_length()} tokens after {tokens.shape[1] + num_new - 1}")
    logits = torch.stack(output.logits, dim=1).float()
    return Run(output.sequences[:, tokens.shape[1] :], logits, dense_reads(cache) - processor.reads_of_prompt)


def scenarios(
    model: PreTrainedModel, make_cache: CacheMaker, known: Mapping[str, Run] | None = None
) -> Iterator[tuple[str, Run]]:
    """Runs a cache through all scenarios, with the tokens of the dense cache's `known` runs; yields names and runs."""
    long, short = prompt(model, PROMPT_LENGTH, 1), prompt(model, _SHORT_LENGTH, 2)
    cache, tokens = make_cache(model), long
    for name, num_new in (("one prompt", NUM_NEW), ("a second turn", _NUM_MORE)):
        run = generate(model, cache, tokens, None, num_new, known[name].tokens if known else None)
        tokens = torch.cat([tokens, run.tokens, prompt(model, _TURN_LENGTH, 3)], dim=1)
        yield name, run
    name, padding = "two prompts of unequal length", PROMPT_LENGTH - _SHORT_LENGTH
    mask = torch.ones(2, PROMPT_LENGTH, dtype=torch.int64)
    mask[1, :padding] = 0
    pair = torch.cat([long, torch.cat([long.new_zeros(1, padding), short], dim=1)])
    yield name, generate(model, make_cache(model), pair, mask, _NUM_MORE, known[name].tokens if known else None)


def _dynamic(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config)


def refer(model: PreTrainedModel) -> tuple[dict[str, Run], float]:
    """
    Runs `DynamicCache` on a model; returns also how far apart logits of another prompt are. A prompt that leaves no
    trace in the logits of a random model, so that nothing could be told, is a `ValueError`.
    """
    runs = dict(scenarios(model, _dynamic))
    first = runs["one prompt"]
    other = generate(model, _dynamic(model), prompt(model, PROMPT_LENGTH, 4), None, NUM_NEW, first.tokens)
    logits = first.logits[:, 1:]
    control = float((other.logits[:, 1:] - logits).norm())
    if not control > _LEAST_CONTROL * float((logits - logits.mean(dim=-1, keepdim=True)).norm()):
        raise ValueError("its prompt leaves no trace in the logits")
    return runs, control / logits.numel() ** 0.5


def try_cache(model: PreTrainedModel, runs: Mapping[str, Run], control: float, case: Case) -> Outcome:
    """Runs a cache on a model and says what came of it, beside the dense cache's `runs` and `control`, see `refer`."""
    worst, reads = 0.0, 0
    try:
        for name, run in scenarios(model, case.make_cache, runs):
            distance = float((run.logits - runs[name].logits).pow(2).mean().sqrt()) / control
            worst, reads = max(worst, distance), reads + run.dense_reads
            # Not `>`, so that a NaN fails
            if not distance <= case.limit:
                return Outcome(status="fails", detail=f"{name}: logits are {distance:.2g} apart", distance=distance)
    except CAUGHT as error:
        status: Status = "refuses" if is_refusal(error) else "fails"
        return Outcome(status=status, detail=f"{type(error).__name__}: {error}")
    return Outcome(status="reads dense" if reads else "works", distance=worst)


def is_refusal(error: BaseException) -> bool:
    """Tells whether a cache has said no: neither the model nor PyTorch raised the error."""
    if not isinstance(error, ValueError | NotImplementedError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raiser = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return raiser.split(".")[0] not in ("transformers", "torch")


def family_names() -> list[str]:
    """Lists the `model_type` of every decoder that the installed Transformers has."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_family(family: str, seed: int = 0) -> PreTrainedModel:
    """Builds a tiny random model of a family. PyTorch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(small_config(family)).eval()


def try_family(family: str, cases: Mapping[str, Case]) -> FamilyResult:
    """Tries caches on a family, in this process."""
    try:
        model = build_family(family)
        runs, control = refer(model)
    except CAUGHT as error:
        return FamilyResult(family=family, dense=f"{type(error).__name__}: {error}")
    outcomes = {name: try_cache(model, runs, control, case) for name, case in cases.items()}
    return FamilyResult(family=family, outcomes=outcomes)


def try_families(
    families: Iterable[str],
    cases: Mapping[str, Case],
    announce: Callable[[str], None] = lambda family: None,
    seconds_a_family: float = 180,
) -> Iterator[FamilyResult]:
    """Tries caches on families, each in a process of its own that is given up after some seconds."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if can_fork:
        # What is loaded now is so in all processes
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try_family(_FIRST, cases)
        torch.set_num_threads(num_threads)
    for family in families:
        announce(family)
        yield _try_apart(family, cases, seconds_a_family) if can_fork else try_family(family, cases)


def _try_apart(family: str, cases: Mapping[str, Case], seconds: float) -> FamilyResult:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(family, cases, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()  # type: ignore[no-any-return]
        reason = f"gave no answer within {seconds:.0f} seconds"
    except EOFError:
        process.join()
        reason = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    return FamilyResult(family=family, dense=reason)


def _send_result(family: str, cases: Mapping[str, Case], sender: Connection) -> None:
    # Of random models with odd settings there is much to be said, which is not what was asked
    warnings.simplefilter("ignore")
    logging.set_verbosity(CRITICAL)
    torch.set_num_threads(1)
    sender.send(try_family(family, cases))


def own_cases() -> dict[str, Case]:
    """Makes cases of GEAR at 8 bits, InfiniGen that fetches everything, H2O that keeps everything."""
    # What everything is fetched for attends as the dense cache does. Speculating as for a model on a GPU
    everything: dict[str, Any] = {"share": 1.0, "max_fetch_ratio": 1.0, "recent": 8, "full_layers": ()}
    h2o = partial(create_cache, "h2o", heavy_ratio=0.5, recent_ratio=0.5)
    return {
        "gear": Case(partial(create_cache, "gear-4bit", nbits=8, residual_length=16), _LOSSY),
        "infinigen": Case(partial(create_cache, "infinigen", **everything, speculate=True), _EXACT),
        "h2o": Case(h2o, _EXACT),
    }


def cases_of(specs: list[str]) -> dict[str, Case]:
    """Makes cases of registered caches by their specs, held to what 8 bits may change."""
    return {spec: Case(partial(create_cache, spec), _LOSSY) for spec in specs}


@benchmark("families")
def survey_families(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of `model_type`s, such as 'qwen*'.")] = "*",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME:key=value,key=value; repeatable. By default GEAR at 8 bits, InfiniGen that fetches "
            "everything and H2O that keeps everything."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After so many a family is given up.", min=1.0)] = 180.0,
) -> Iterator[Found]:
    """Try caches on a tiny random model of every decoder family.

    The families are those of the installed Transformers. Each cache is held against DynamicCache: one prompt and a
    second turn, and two prompts of unequal length. It works, works and reads whole layers dense while decoding,
    refuses and says why, or fails.

    \b
    Examples:
        kvcache-plugins models
        kvcache-plugins models 'gemma*' --cache gear-2bit --cache h2o
        kvcache-plugins models --json | jq '.rows[] | select(.outcomes.gear.status != "works")'
        kvcache-plugins models --out eval/results/families.json
    """
    families = [name for name in family_names() if fnmatchcase(name, pattern)]
    if not families:
        raise ValueError(f"`pattern` {pattern!r} matches no family; there are {', '.join(family_names())}")
    cases = cases_of(cache) if cache else own_cases()
    yield Settings(families=pattern, caches=" ".join(cases))
    with track_progress(len(families)) as announce:
        yield from map(asdict, try_families(families, cases, announce, seconds))
