"""Several caches on one prompt, side by side: what each writes, how far it strays, what it holds and how fast it is.

Every cache is used twice. Once to generate, see `generation`. And once to be scored: the
prompt fills a fresh cache, the *dense* cache's continuation is fed through it, and its next-token distributions are
held against the dense ones at the same positions. Two texts that part early say little about how different the caches
are; distributions over one text do.

`dynamic` always comes first: it is the reference.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from textwrap import shorten

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console.display import make_table, open_console
from kvcache_plugins.eval.harness import CACHE_FAILURES, REFERENCE, cache_factories, with_reference
from kvcache_plugins.gear.config import PresetChoice

from .fidelity import LayerErrors, continuation_logits, fill_cache, record_attention, score_logits
from .generation import Generation, generate_with, generation_fields


# Tokens that every cache begins to compress
_WARM_UP = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """
    One cache beside the reference.

    Args:
        cache (`str`): The name, with options if any.
        text (`str`): What was generated.
        generation (`Generation`, *optional*): Tokens, times and bytes; `None` when the cache failed.
        first_difference (`int`, *optional*): Index of the first token that is not the reference's, if there is one.
        kl (`float`, *optional*): Mean KL(dense || cache) along the reference's continuation, in nats.
        top1_agreement (`float`, *optional*): Share of it at which both find the same token most likely.
        layer_errors (`tuple[float, ...]`): Relative error of every layer's attention output along it.
        error (`str`, *optional*): What the cache raised.
    """

    cache: str
    text: str = ""
    generation: Generation | None = None
    first_difference: int | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    layer_errors: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Dense:
    """The reference's text, the tokens that are scored of it, and what the dense cache makes of them."""

    generation: Generation
    targets: torch.Tensor
    logits: torch.Tensor
    outputs: list[torch.Tensor]


class Comparison:
    """
    Caches compared on one prompt, against `dynamic`.

    Args:
        model (`PreTrainedModel`): The model, in eval mode.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        token_ids (`torch.Tensor`): The prompt, `[num_tokens]`.
        caches (`Sequence[str]`): `name` or `name:key=value,key=value`. A wrong one is a `ValueError` here.
        max_new_tokens (`int`): Tokens to generate at most.
        seed (`int`, *optional*, defaults to 42): Random seed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        token_ids: torch.Tensor,
        caches: Sequence[str],
        *,
        max_new_tokens: int,
        seed: int = 42,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1, but got {max_new_tokens}")
        self.model = model
        self.tokenizer = tokenizer
        self.token_ids = token_ids
        self.factories = cache_factories(with_reference(caches), model)
        self.max_new_tokens = max_new_tokens
        self.seed = seed

    @property
    def num_steps(self) -> int:
        """How often `run` announces what it does, if no text ends early."""
        return len(self.factories) * (1 + self.max_new_tokens)

    def run(self, announce: Callable[[str], None]) -> list[ComparisonRow]:
        """The rows, `dynamic` first. A cache that fails on the way has a row with its error."""
        announce(REFERENCE)
        self._warm_up()
        generation = self._generate(REFERENCE, announce)
        continuation = torch.tensor(generation.token_ids)
        # What follows the last token is nobody's text; a single token has nothing else
        fed = continuation[: max(1, continuation.numel() - 1)]
        dense = _Dense(generation, continuation[-fed.numel() :], *self._score(REFERENCE, fed))
        rows = [self._row(REFERENCE, generation, dense.logits, dense.outputs, dense)]
        for name in list(self.factories)[1:]:
            announce(name)
            try:
                rows.append(self._row(name, self._generate(name, announce), *self._score(name, fed), dense))
            except CACHE_FAILURES as error:
                rows.append(ComparisonRow(cache=name, error=f"{type(error).__name__}: {error}"))
        return rows

    def _row(
        self,
        name: str,
        generation: Generation,
        logits: torch.Tensor,
        outputs: list[torch.Tensor],
        dense: _Dense,
    ) -> ComparisonRow:
        score = score_logits(dense.logits, logits, dense.targets)
        errors = LayerErrors()
        errors.add(dense.outputs, outputs)
        return ComparisonRow(
            cache=name,
            text=str(self.tokenizer.decode(list(generation.token_ids), skip_special_tokens=True)),
            generation=generation,
            first_difference=first_difference(dense.generation.token_ids, generation.token_ids),
            kl=score.mean_kl,
            top1_agreement=score.num_agreeing / score.num_scored,
            layer_errors=errors.relative(),
        )

    def _warm_up(self) -> None:
        # Whatever is loaded or compiled when a cache is first used is not counted as its speed
        for factory in self.factories.values():
            with suppress(*CACHE_FAILURES):
                generate_with(self.model, self.token_ids[:_WARM_UP], factory(), max_new_tokens=2)

    def _generate(self, name: str, announce: Callable[[str], None]) -> Generation:
        return generate_with(
            self.model,
            self.token_ids,
            self.factories[name](),
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            on_token=lambda: announce(name),
        )

    def _score(self, name: str, continuation: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits along a continuation, and every layer's attention outputs."""
        cache = self.factories[name]()
        fill_cache(self.model, self.token_ids, cache)
        with record_attention(self.model) as recorded:
            logits = continuation_logits(self.model, continuation, cache)
        return logits, recorded.by_layer()


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter one's end counting as a difference; `None` if none does."""
    if tuple(reference) == tuple(other):
        return None
    pairs = enumerate(zip(reference, other, strict=False))
    return next((index for index, (one, two) in pairs if one != two), min(len(reference), len(other)))


def row_fields(row: ComparisonRow) -> dict[str, object]:
    """A row for `compare --json`."""
    fields: dict[str, object] = {"cache": row.cache, "error": row.error}
    if row.generation is None:
        return fields
    return {
        **fields,
        "text": row.text,
        "first_difference": row.first_difference,
        "kl": row.kl,
        "top1_agreement": row.top1_agreement,
        "layer_errors": row.layer_errors,
        **generation_fields(row.generation),
    }


# Characters of the generated text in a table, and the width from which there is room for them
SHORT_TEXT = 20
TEXT_FROM_WIDTH = 100


def summary_line(cache: str, num_prompt_tokens: int, generation: Generation) -> str:
    """Bytes held and speed of one generation."""
    memory = generation.memory
    held = f"{memory}; the parts `residual` and `dense` are exact"
    if memory.shared:
        held += f", and {sum(memory.shared.values()):,} that all caches of the model share"
    if not generation.was_exercised:
        num_tokens = num_prompt_tokens + len(generation.token_ids)
        held = f"{num_tokens} tokens: too short to compress, held exact in {memory.total_bytes:,} bytes"
    clock = "processor" if "cpu" in memory.devices else "clock"
    prompt = f"prompt of {num_prompt_tokens} tokens in {generation.prefill_seconds:.2f} s of {clock} time"
    speed = f"{len(generation.token_ids)} new ones at {_milliseconds(generation.seconds_per_token)} ms"
    return f"{cache}: {held}; {prompt}, {speed}"


def choice_line(choice: PresetChoice) -> str:
    """Which preset a bound has chosen, and what was measured of it and of those that were tried before it."""
    failed = [f"{preset} {kl:.4f}" for preset, kl in choice.kl_by_preset.items() if preset != choice.preset]
    others = f"; too far: {', '.join(failed)}" if failed else ""
    return f"{choice.preset} was chosen: KL {choice.kl:.4f}, at most {choice.max_kl:g}{others}"


def print_rows(title: str, rows: Sequence[ComparisonRow]) -> None:
    """Prints the rows of a comparison: numbers, bytes by part, and every text as a whole."""
    console = open_console()
    columns = {
        "cache": "name",
        "differs at": "number",
        "KL": "number",
        "top-1": "number",
        "MB": "number",
        "KV %": "number",
        "ratio": "number",
        # Processor time on a CPU
        "prefill s": "number",
        "ms/token": "number",
    }
    # A narrow terminal keeps the numbers: the texts stand below in any case
    if console.width >= TEXT_FROM_WIDTH:
        columns["text"] = "text"
    console.print(make_table(title, columns, [_number_cells(row)[: len(columns)] for row in rows]))
    reports = {row.cache: row.generation.memory.parts for row in rows if row.generation is not None}
    parts = list(dict.fromkeys(part for report in reports.values() for part, size in report.items() if size))
    cells = [(cache, *(_kilobytes(report.get(part, 0)) for part in parts)) for cache, report in reports.items()]
    console.print(make_table("kB held, by part", {"cache": "name", **dict.fromkeys(parts, "number")}, cells))
    for row in rows:
        console.print(f"{row.cache}:", style="bold", markup=False)
        console.print(f"failed with {row.error}" if row.error else row.text, markup=False, soft_wrap=True)
        console.print()


def _number_cells(row: ComparisonRow) -> tuple[str, ...]:
    if row.generation is None:
        return row.cache, *["-"] * 8, shorten(f"failed: {row.error}", SHORT_TEXT, placeholder="...")
    generation = row.generation
    memory = generation.memory
    return (
        row.cache,
        "-" if row.first_difference is None else str(row.first_difference),
        _number(row.kl, 4),
        _number(row.top1_agreement, 3),
        f"{memory.total_bytes / 1e6:.2f}",
        # Too short to compress: what exact tokens take beside their buffer says nothing of the cache
        f"{memory.kv_percent:.1f}" if generation.was_exercised else "exact",
        f"{memory.compression_ratio:.2f}" if generation.was_exercised else "-",
        f"{generation.prefill_seconds:.2f}",
        _milliseconds(generation.seconds_per_token),
        shorten(row.text, SHORT_TEXT, placeholder="..."),
    )


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:,.1f}" if size else "-"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
