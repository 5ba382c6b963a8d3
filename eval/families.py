"""Survey of presets on a tiny random model of every decoder family of Transformers, or of every family that reads
pictures, sounds or a source text beside its tokens (see `media.py`).

The dense cache picks the tokens, and logits of all caches are compared along them. The unit of distances is the
distance of logits of the same tokens after another prompt: 0 is the dense cache itself, 1 is a cache that knows
nothing of the prompt. A cache is compared

- with itself, used in another way: by `generate` and forward by forward, in a padded batch and alone, in chunks by
  `generate` and by hand. Both have to agree up to rounding;
- with the dense cache. The limit is the distance of a dense cache with random errors of as many bits (`InexactCache`),
  so that every family has a limit of its own;
- with the dense cache in a nearly lossless form: 8 bits, all tokens fetched, none dropped. Random models attend
  broadly, so that errors of 2 bits, or dropped tokens, would hide a wrong position.

Each family is tried in a process of its own, so that a model that hangs or crashes costs its own row alone. Processes
are forked if the system can: PyTorch and Transformers are loaded once, and caches may be made by any function.
"""

import dataclasses
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from logging import CRITICAL
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.utils import logging

from kvcache_plugins.models.cache_argument import as_argument, reading_options
from kvcache_plugins.registry import create_cache
from kvcache_plugins.transform_coding import calibrate_transform

from .inexact_cache import InexactCache
from .media import START, media_inputs, media_of
from .tiny_models import build_family, prompt


Status = Literal["works", "works, dense reads", "refuses", "FAILS"]
CacheMaker = Callable[[], Cache]
Prepare = Callable[[PreTrainedModel], CacheMaker]
Bits = tuple[float, float]

PROMPT_LENGTH, NUM_NEW = 80, 10
# Length of the shorter of two prompts; it too is long enough to be coded at once
_SHORT_LENGTH = 71
# With the tokens before it, enough to fill a buffer of 64
_TURN_LENGTH = 70
_CALIBRATION_LENGTH = 192
_NUM_MORE = 5
# Two chunks that are compressed, and a rest
_CHUNKED_LENGTH, _CHUNK_LENGTH = 150, 70
# Least share of the logits' spread that a prompt has to change: distances in a smaller unit would be rounding
_LEAST_CONTROL = 1e-3
# Rounding of another order of sums, carried through a few layers
_EXACT = 1e-3
# The same for a cache of codes: rounding can change a code, or the choice of a token
_SAME = 0.05
# Factor of the distance by random errors: these are drawn once, and may change the choice of an indexer
_MARGIN = 2.0
# Known to run in a second
_FIRST = "llama"
# Errors of code that does not fit a model
CAUGHT = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(RuntimeError, StrictDataclassError, TypeError, ValueError),
)


class Form(NamedTuple):
    """
    A form of a cache: a function that makes one for a model, and the bits of a number of its keys and of its values.
    `None` is for exact numbers, 0 for tokens that are evicted or not selected.
    """

    prepare: Prepare
    nbits: Bits | None = None


class Case(NamedTuple):
    """A cache to try: the preset, and a nearly lossless form, in which faults show most."""

    usual: Form
    finest: Form | None = None
    holds: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """
    Verdict of a cache on a family: the reason of a refusal or failure, a description of the stored numbers (`holds`),
    and the distance from the dense cache's logits, of the usual form in the use that comes nearest to its limit.
    """

    status: Status
    detail: str = ""
    holds: str = ""
    distance: float | None = None
    limit: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FamilyResult:
    """A family by its `model_type`: outcomes by cache, or the error of `DynamicCache` (`dense`)."""

    family: str
    dense: str = ""
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)


class Run(NamedTuple):
    """New tokens `[batch, new]`, their logits `[batch, new, vocabulary]`, and dense reads while decoding."""

    tokens: torch.Tensor
    logits: torch.Tensor
    dense_reads: int


class Use(NamedTuple):
    """A way to use caches. Its logits must equal those of its `twin`, another way to the same tokens."""

    run: Callable[[PreTrainedModel, CacheMaker, torch.Tensor | None], Run]
    twin: str | None = None


def dense_reads(cache: Cache) -> int:
    """Return a cache's counter of keys or values that were made dense; 0 without a counter."""
    stats = getattr(cache, "stats", None)
    return int(stats().get("dense_reads", 0)) if callable(stats) else 0


class _Picker(LogitsProcessor):
    """Picks the `forced` tokens, if given, and records dense reads before each token; the first follows the prompt."""

    def __init__(self, cache: Cache, forced: torch.Tensor | None):
        self._cache, self._forced = cache, forced
        self.reads: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reads.append(dense_reads(self._cache))
        if self._forced is None:
            return scores
        # Finite scores keep all beams alive
        forced = self._forced[:, len(self.reads) - 1, None].expand(len(scores), 1)
        return torch.full_like(scores, -1e3).scatter(1, forced, 0.0)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    cache: Cache,
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    num_new: int,
    forced: torch.Tensor | None,
    chunk_size: int | None = None,
    num_beams: int = 1,
) -> Run:
    """Generate tokens after a prompt `[batch, length]`, `forced` or the likeliest, and return the best beam."""
    picker = _Picker(cache, forced)
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    options: dict[str, Any] = {
        "do_sample": False,
        "pad_token_id": 0,
        "decoder_start_token_id": START,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    options |= {"prefill_chunk_size": chunk_size, "num_beams": num_beams}
    model.generation_config = GenerationConfig(max_new_tokens=num_new, min_new_tokens=num_new, **options)
    output = model.generate(  # type: ignore[operator]
        **{f"{prefix}input_ids": tokens, f"{prefix}attention_mask": torch.ones_like(tokens) if mask is None else mask},
        **media_inputs(model, tokens, cache.get_seq_length()),
        **as_argument(_in_pair(model, cache)),
        logits_processor=LogitsProcessorList([picker]),
    )
    if cache.get_seq_length() != tokens.shape[1] + num_new - 1:
        raise ValueError(f"its cache holds {cache.get_seq_length()} tokens after {tokens.shape[1] + num_new - 1}")
    logits = torch.stack(output.logits, dim=1).float()
    if num_beams > 1:
        logits = logits[output.beam_indices[:, :num_new], torch.arange(num_new, dtype=torch.int64, device="cpu")]
    return Run(output.sequences[:, tokens.shape[1] :], logits, dense_reads(cache) - picker.reads[0])


def _in_pair(model: PreTrainedModel, cache: Cache) -> Cache:
    """Join a cache of decoder tokens with one of the encoder's states, if the model has an encoder."""
    return EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache


@torch.no_grad()
def forward(model: PreTrainedModel, cache: Cache, tokens: torch.Tensor, chunk_size: int, forced: torch.Tensor) -> Run:
    """Do what `generate` does, forward by forward."""
    length, all_tokens = tokens.shape[1], torch.cat([tokens, forced], dim=1)
    stops = [*range(chunk_size, length, chunk_size), *range(length, all_tokens.shape[1])]
    logits, held = [], _in_pair(model, cache)
    for stop in stops:
        logits.append(_read(model, held, all_tokens[:, :stop], cache.get_seq_length())[:, -1:])
    return Run(forced, torch.cat(logits[-forced.shape[1] :], dim=1), 0)


def _read(model: PreTrainedModel, cache: Cache, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Read the tokens from `start` on, with their pictures, and return logits."""
    if media_of(model) is None:
        options = reading_options(model.forward, cache, tokens, None, tokens.shape[1])
        return model(**options).logits.float()  # type: ignore[no-any-return]
    # Positions are the model's own
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    media = media_inputs(model, tokens, start)
    of_tokens = {name: each[:, start:] for name, each in media.items() if name.endswith("token_type_ids")}
    options = {f"{prefix}input_ids": tokens[:, start:], **media, **of_tokens, **as_argument(cache), "use_cache": True}
    return model(**options).logits.float()  # type: ignore[no-any-return]


def _take_turns(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    cache, tokens = make_cache(), prompt(model, PROMPT_LENGTH, 1)
    turns = (None, None) if forced is None else forced.split((NUM_NEW, _NUM_MORE), dim=1)
    first = generate(model, cache, tokens, None, NUM_NEW, turns[0])
    tokens = torch.cat([tokens, first.tokens, prompt(model, _TURN_LENGTH, 3, has_media=False)], dim=1)
    second = generate(model, cache, tokens, None, _NUM_MORE, turns[1])
    tokens, logits = (torch.cat(both, dim=1) for both in zip(first[:2], second[:2], strict=True))
    return Run(tokens, logits, first.dense_reads + second.dense_reads)


def _forward_turn(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    assert forced is not None
    tokens = prompt(model, PROMPT_LENGTH, 1)
    return forward(model, make_cache(), tokens, tokens.shape[1], forced[:, :NUM_NEW])


def _search_beams(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    assert forced is not None
    tokens = prompt(model, PROMPT_LENGTH, 1)
    return generate(model, make_cache(), tokens, None, NUM_NEW, forced[:, :NUM_NEW], num_beams=2)


@torch.no_grad()
def _generate_behind_forward(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    tokens, cache = prompt(model, PROMPT_LENGTH, 1), make_cache()
    _read(model, _in_pair(model, cache), tokens[:, :-1], 0)
    return generate(model, cache, tokens, None, NUM_NEW, forced)


def _look_again(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    """Read a second picture in a second turn: by hand, as `generate` of many families cannot."""
    cache, tokens = make_cache(), prompt(model, PROMPT_LENGTH, 1)
    first = generate(model, cache, tokens, None, _NUM_MORE, None if forced is None else forced[:, :_NUM_MORE])
    tokens = torch.cat([tokens, first.tokens, prompt(model, _TURN_LENGTH, 3)], dim=1)
    with torch.no_grad():
        logits = _read(model, _in_pair(model, cache), tokens, cache.get_seq_length())[:, -1:]
    return Run(first.tokens, torch.cat([first.logits[:, : _NUM_MORE - 1], logits], dim=1), first.dense_reads)


def _read_pair(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    long, short = prompt(model, PROMPT_LENGTH, 1), prompt(model, _SHORT_LENGTH, 2)
    padding = PROMPT_LENGTH - _SHORT_LENGTH
    mask = torch.ones(2, long.shape[1], dtype=torch.int64, device="cpu")
    mask[1, :padding] = 0
    pair = torch.cat([long, torch.cat([long.new_zeros(1, padding), short], dim=1)])
    return generate(model, make_cache(), pair, mask, _NUM_MORE, forced)


def _read_alone(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    assert forced is not None
    return generate(model, make_cache(), prompt(model, _SHORT_LENGTH, 2), None, _NUM_MORE, forced[-1:])


def _read_chunks(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    tokens = prompt(model, _CHUNKED_LENGTH, 5)
    return generate(model, make_cache(), tokens, None, _NUM_MORE, forced, _CHUNK_LENGTH)


def _forward_chunks(model: PreTrainedModel, make_cache: CacheMaker, forced: torch.Tensor | None) -> Run:
    assert forced is not None
    return forward(model, make_cache(), prompt(model, _CHUNKED_LENGTH, 5), _CHUNK_LENGTH, forced)


# A use comes after its twin
USES = {
    "two turns": Use(_take_turns),
    "two prompts of unequal length": Use(_read_pair),
    "a prompt in chunks": Use(_read_chunks),
    "forward by forward": Use(_forward_turn, "two turns"),
    "the shorter prompt alone": Use(_read_alone, "two prompts of unequal length"),
    "chunks, forward by forward": Use(_forward_chunks, "a prompt in chunks"),
}
MEDIA_USES = {
    **USES,
    "two pictures in two turns": Use(_look_again),
    "two beams": Use(_search_beams, "two turns"),
    "generate behind a forward": Use(_generate_behind_forward),
}
# A family is tried if its dense cache works in these uses, and in the other uses that work
_REQUIRED = ("two turns", "two prompts of unequal length")


class Reference:
    """
    Runs of the dense cache on a model by use, and the unit of distances, the distance of another prompt's logits.
    Raises a `ValueError` if prompts do not change logits.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.runs: dict[str, Run] = {}
        self._errors: dict[Bits, float] = {}
        self._unit = 1.0
        make_cache = partial(create_cache, "dynamic", model)
        self.uses = USES if media_of(model) is None else MEDIA_USES
        for name, (run_use, twin) in self.uses.items():
            try:
                run = run_use(model, make_cache, self.runs[twin].tokens if twin else None)
            except CAUGHT:
                if name in _REQUIRED:
                    raise
                continue
            if name == "two turns":
                self._unit = self._distance_of_another_prompt(run)
            # A twin that differs with the dense cache too is not compared
            if twin is None or self.distance(run, self.runs[twin]) <= _EXACT:
                self.runs[name] = run

    def _distance_of_another_prompt(self, run: Run) -> float:
        make_cache, tokens = partial(create_cache, "dynamic", self.model), run.tokens[:, :NUM_NEW]
        other = generate(self.model, make_cache(), prompt(self.model, PROMPT_LENGTH, 4), None, NUM_NEW, tokens)
        # The first ones are of the prompt itself
        logits = run.logits[:, 1:NUM_NEW]
        spread = self.distance(Run(tokens, logits.mean(dim=-1, keepdim=True), 0), Run(tokens, logits, 0))
        control = self.distance(Run(tokens, other.logits[:, 1:], 0), Run(tokens, logits, 0))
        if not control > _LEAST_CONTROL * spread:
            raise ValueError("its prompt leaves no trace in the logits")
        return control

    def distance(self, run: Run, other: Run) -> float:
        """Return the distance of logits from those of another run, at its last sequences and first tokens."""
        rows, steps, _ = run.logits.shape
        return float((run.logits - other.logits[-rows:, :steps]).pow(2).mean().sqrt()) / self._unit

    def limit(self, nbits: Bits | None) -> float:
        """
        Return the largest allowed distance from the dense cache's logits: that of an `InexactCache` of as many bits in
        its worst use, with a margin.
        """
        if nbits is None:
            return _EXACT
        if nbits not in self._errors:
            key_nbits, value_nbits = nbits
            make_cache = partial(InexactCache, self.model, key_nbits=key_nbits, value_nbits=value_nbits)
            runs = {self.uses[name].run: run for name, run in self.runs.items() if self.uses[name].twin is None}
            self._errors[nbits] = max(
                self.distance(run_use(self.model, make_cache, run.tokens), run) for run_use, run in runs.items()
            )
        return _EXACT + _MARGIN * self._errors[nbits]


class Comparison(NamedTuple):
    """Distance of a use of a cache from the dense cache's logits, or from its own, and the limit of the distance."""

    use: str
    distance: float
    limit: float
    dense_reads: int


def compare(reference: Reference, form: Form, *, with_twins: bool) -> Iterator[Comparison]:
    """Run a form of a cache in every use of the dense cache, and yield the distances."""
    make_cache, limit = form.prepare(reference.model), reference.limit(form.nbits)
    own: dict[str, Run] = {}
    for name, dense in reference.runs.items():
        run_use, twin = reference.uses[name]
        # With dense reads attention does not show padding, which is then coded like tokens
        if twin is not None and (not with_twins or own[twin].dense_reads):
            continue
        run = own[name] = run_use(reference.model, make_cache, dense.tokens)
        if twin is None:
            yield Comparison(name, reference.distance(run, dense), limit, run.dense_reads)
        else:
            yield Comparison(name, reference.distance(run, own[twin]), _SAME, 0)


def try_cache(reference: Reference, case: Case) -> Outcome:
    """Try a cache on a model, and return the outcome."""
    outcome, nearest, reads = partial(Outcome, holds=case.holds), (0.0, 1.0), 0
    try:
        for form, words in ((case.usual, ""), (case.finest, " in its finest form")):
            for each in () if form is None else compare(reference, form, with_twins=form is case.usual):
                reads += each.dense_reads
                found = each.distance, each.limit
                # Not `>`, so that a NaN fails
                if not each.distance <= each.limit:
                    apart = "logits are {:.2g} apart, at most {:.2g} is right".format(*found)
                    return outcome("FAILS", f"{each.use}{words}: {apart}", distance=each.distance, limit=each.limit)
                if form is case.usual and found[0] / found[1] >= nearest[0] / nearest[1]:
                    nearest = found
    except CAUGHT as error:
        return outcome("refuses" if is_refusal(error) else "FAILS", f"{type(error).__name__}: {error}")
    return outcome("works, dense reads" if reads else "works", distance=nearest[0], limit=nearest[1])


def is_refusal(error: BaseException) -> bool:
    """Return true if a cache has refused: neither the model nor PyTorch raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raiser = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return isinstance(error, ValueError | NotImplementedError) and raiser not in ("transformers", "torch")


def try_family(family: str, cases: Mapping[str, Case], *, has_media: bool = False) -> FamilyResult:
    """Try caches on a family, in this process."""
    try:
        model = build_family(family, has_media=has_media)
        reference = Reference(model)
    except CAUGHT as error:
        return FamilyResult(family=family, dense=f"{type(error).__name__}: {error}")
    outcomes = {name: try_cache(reference, case) for name, case in cases.items()}
    return FamilyResult(family=family, outcomes=outcomes)


def try_families(
    families: Iterable[str],
    cases: Mapping[str, Case],
    announce: Callable[[str], None] = lambda family: None,
    seconds_a_family: float = 180,
    *,
    has_media: bool = False,
) -> Iterator[FamilyResult]:
    """Try caches on families, each in a process of its own, which is killed after some seconds."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if can_fork:
        # Load now what all processes need
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try_family(_FIRST, cases)
        torch.set_num_threads(num_threads)
    for family in families:
        announce(family)
        trial = partial(try_family, family, cases, has_media=has_media)
        yield _try_apart(family, trial, seconds_a_family) if can_fork else trial()


def _try_apart(family: str, trial: Callable[[], FamilyResult], seconds: float) -> FamilyResult:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(trial, sender), daemon=True)
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


def _send_result(trial: Callable[[], FamilyResult], sender: Connection) -> None:
    # Random models with odd settings warn a lot
    warnings.simplefilter("ignore")
    logging.set_verbosity(CRITICAL)
    torch.set_num_threads(1)
    sender.send(trial())


def prepared(name: str, **options: Any) -> Prepare:
    """Return a function that makes a registered cache with options for a model."""
    return lambda model: partial(create_cache, name, model, **options)


def calibrated(name: str, **options: Any) -> Prepare:
    """Return a function that makes a registered cache, calibrated on a model."""

    def prepare(model: PreTrainedModel) -> CacheMaker:
        calibration = calibrate_transform(model, [prompt(model, _CALIBRATION_LENGTH, 9)[0]])
        return partial(create_cache, name, model, calibration=calibration, **options)

    return prepare


def own_cases(*, has_media: bool = False) -> dict[str, Case]:
    """
    Make cases of the main presets, each with a form of 8 bits or without dropped and skipped tokens. With media there
    are no calibrated ones, as calibration reads texts.
    """
    # Layers that InfiniGen leaves whole are all that a tiny model has
    offload: dict[str, Any] = {"full_layers": ()}
    # Speculate as on a GPU
    fetch_all = {**offload, "alpha": float("inf"), "max_fetch_ratio": 1.0, "recent": 8, "speculate": True}
    keep_all = {"heavy_ratio": 0.5, "recent_ratio": 0.5}
    # The byte of a row's scale has an error as large as that of the last of 8 bits
    fine, nothing, eight = (7.0, 7.0), (0.0, 0.0), {"key_nbits": 8, "value_nbits": 8}
    # Heads of 16 channels have 6 bytes for the 3.25 bits of a value
    rows, row_bits = "keys 4, values 3.25 bits", (4.0, 3.0)

    def case(holds: str, prepare: Prepare, nbits: Bits, finest: Prepare, finest_nbits: Bits | None) -> Case:
        return Case(Form(prepare, nbits), Form(finest, finest_nbits), holds)

    cases = {
        "transform": case(rows, prepared("transform"), row_bits, prepared("transform", **eight), fine),
        "gear-4bit": case("4 bits", prepared("gear-4bit"), (4.0, 4.0), prepared("gear-4bit", nbits=8), fine),
        "kivi-2bit": case("2 bits", prepared("kivi-2bit"), (2.0, 2.0), prepared("kivi-2bit", nbits=8), fine),
        "calibrated-16": case(
            "2.23 bits, calibrated",
            calibrated("calibrated-16"),
            (2.23, 2.23),
            calibrated("calibrated-16", nbits=8),
            fine,
        ),
        "infinigen": case(
            "all, fetches some", prepared("infinigen", **offload), nothing, prepared("infinigen", **fetch_all), None
        ),
        "infinigen-transform": case(
            f"{rows}, fetches some",
            prepared("infinigen-transform", **offload),
            nothing,
            prepared("infinigen-transform", **fetch_all, **eight),
            fine,
        ),
        "h2o": case("a fifth of the tokens", prepared("h2o"), nothing, prepared("h2o", **keep_all), None),
    }
    return {name: each for name, each in cases.items() if not (has_media and name.startswith("calibrated"))}


def cases_of(specs: list[str], bits: float) -> dict[str, Case]:
    """Make cases of caches by their specs: those of `own_cases`, and others with the limit of `bits`."""
    own = own_cases()
    return {spec: own.get(spec) or Case(Form(prepared(spec), (bits, bits)), holds=f"{bits:g} bits") for spec in specs}
