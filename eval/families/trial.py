"""One cache on one model, held against `DynamicCache`.

Everything goes through `generate`, as a model's own way of counting positions and making masks is part of what has to
work. Tokens are those that the dense cache picks: a cache that loses precision is compared logit by logit along the
same text, not where one other token leads to.

A distance between logits is measured in that of the same tokens after another prompt: 0 is the dense cache's own, 1 is
as far off as knowing nothing of the prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Cache, DynamicCache, GenerationConfig, LogitsProcessor, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument


Status = Literal["works", "reads dense", "refuses", "fails"]
CacheMaker = Callable[[PreTrainedModel], Cache]

PROMPT_LENGTH, NUM_NEW = 80, 20
# Of the shorter one of two prompts
_SHORT_LENGTH = 67
_TURN_LENGTH = 12
_NUM_MORE = 6
# Less than this share of the logits' spread, and what is measured in it would be rounding
_LEAST_CONTROL = 1e-3
# What code runs into that was not made for a model
CAUGHT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """
    What a cache did on a model.

    Attributes:
        status (`str`): `"works"`, `"reads dense"` (works, and decode steps made a layer dense), `"refuses"` or
            `"fails"`.
        detail (`str`): why it refuses or fails; empty otherwise.
        distance (`float`, *optional*): from the dense cache's logits, the largest of all that was run.
    """

    status: Status
    detail: str = ""
    distance: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Tokens `[batch, new tokens]`, their logits `[batch, new tokens, vocabulary]`, and sides read dense since."""

    tokens: torch.Tensor
    logits: torch.Tensor
    dense_reads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Answers of `DynamicCache`, and how far apart logits of another prompt are: by scenario, those that it can do."""

    runs: dict[str, list[Run]]
    control: float


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
    """How often a cache says that it has made a layer's side dense; 0 of one that says nothing."""
    stats = getattr(cache, "stats", None)
    return int(stats().get("dense_reads", 0)) if callable(stats) else 0


def scenarios(
    model: PreTrainedModel, make_cache: CacheMaker, known: dict[str, list[Run]]
) -> Iterator[tuple[str, list[Run]]]:
    """
    Runs a cache through all scenarios: name and what came out, by turn.

    Args:
        model (`PreTrainedModel`): the model.
        make_cache (`Callable`): makes a cache for it.
        known (`dict[str, list[Run]]`): what the dense cache did, whose tokens are taken; empty for that cache itself.
    """
    long, short = prompt(model, PROMPT_LENGTH, 1), prompt(model, _SHORT_LENGTH, 2)
    if not known or "one prompt, two turns" in known:
        cache, tokens = make_cache(model), long
        runs: list[Run] = []
        for num_new in (NUM_NEW, _NUM_MORE):
            forced = known["one prompt, two turns"][len(runs)].tokens if known else None
            runs.append(generate(model, cache, tokens, None, num_new, forced))
            tokens = torch.cat([tokens, runs[-1].tokens, prompt(model, _TURN_LENGTH, 3)], dim=1)
        yield "one prompt, two turns", runs
    if not known or "two prompts of unequal length" in known:
        padding = long.new_zeros(1, PROMPT_LENGTH - _SHORT_LENGTH)
        mask = torch.ones(2, PROMPT_LENGTH, dtype=torch.int64)
        mask[1, : padding.shape[1]] = 0
        pair = torch.cat([long, torch.cat([padding, short], dim=1)])
        forced = known["two prompts of unequal length"][0].tokens if known else None
        run = generate(model, make_cache(model), pair, mask, _NUM_MORE, forced)
        yield "two prompts of unequal length", [run]


def prompt(model: PreTrainedModel, length: int, seed: int) -> torch.Tensor:
    """Random tokens `[1, length]`, none of them special."""
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
    """New tokens after a prompt `[batch, length]`: those that are `forced`, or the likeliest."""
    processor = _Forced(forced, cache)
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        output_logits=True,
        return_dict_in_generate=True,
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
    return Run(
        tokens=output.sequences[:, tokens.shape[1] :],
        logits=logits,
        dense_reads=dense_reads(cache) - processor.reads_of_prompt,
    )


def refer(model: PreTrainedModel) -> Reference:
    """
    What `DynamicCache` does on a model.

    Raises:
        ValueError: if a prompt leaves no trace in the logits of a random model, so that nothing could be told.
    """
    runs = dict(scenarios(model, _dynamic, {}))
    first = runs["one prompt, two turns"][0]
    other = generate(model, _dynamic(model), prompt(model, PROMPT_LENGTH, 4), None, NUM_NEW, first.tokens)
    control = float((other.logits - first.logits)[:, 1:].norm())
    spread = first.logits[:, 1:] - first.logits[:, 1:].mean(dim=-1, keepdim=True)
    if not control > _LEAST_CONTROL * float(spread.norm()):
        raise ValueError("its prompt leaves no trace in the logits")
    return Reference(runs=runs, control=control / first.logits[:, 1:].numel() ** 0.5)


def _dynamic(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config)


def try_cache(model: PreTrainedModel, reference: Reference, make_cache: CacheMaker, limit: float) -> Outcome:
    """
    Runs a cache on a model and says what came of it.

    Args:
        model (`PreTrainedModel`): the model.
        reference (`Reference`): what the dense cache did on it.
        make_cache (`Callable`): makes a cache for a model.
        limit (`float`): how far from the dense cache's logits it may be.
    """
    worst, reads = 0.0, 0
    try:
        for name, runs in scenarios(model, make_cache, reference.runs):
            for run, dense in zip(runs, reference.runs[name], strict=True):
                difference = (run.logits - dense.logits).pow(2).mean().sqrt()
                distance = float(difference) / reference.control
                worst, reads = max(worst, distance), reads + run.dense_reads
                # Not `>`, so that a NaN fails
                if not distance <= limit:
                    return Outcome(
                        status="fails", detail=f"{name}: logits are {distance:.2g} apart", distance=distance
                    )
    except CAUGHT as error:
        status: Status = "refuses" if is_refusal(error) else "fails"
        return Outcome(status=status, detail=f"{type(error).__name__}: {error}")
    return Outcome(status="reads dense" if reads else "works", distance=worst)


def is_refusal(error: BaseException) -> bool:
    """Whether a cache has said no: a `ValueError` or `NotImplementedError` that neither model nor PyTorch raised."""
    if not isinstance(error, ValueError | NotImplementedError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raiser = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return raiser.split(".")[0] not in ("transformers", "torch")
