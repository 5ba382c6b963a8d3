"""Several caches on one prompt, side by side: text, distance from the dense cache, bytes and speed.

Every cache is used twice. First it generates, timed token by token: the first interval is the prefill, the next one
warms up, and the median of the others is the time of a decoded token. Times are the process' own processor time on a
CPU, so that other programs do not count, and wall time on a GPU. Then it is scored: the prompt fills a fresh cache,
the dense cache's continuation is fed through it, and next-token distributions are compared at the same positions.
Texts alone would say little, as they differ in everything after the first other token.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from textwrap import shorten
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList, set_seed
from transformers.generation.streamers import BaseStreamer

from kvcache_plugins.console.display import open_console, track_progress
from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval import harness
from kvcache_plugins.eval.tables import Column, Row, code, number, print_markdown, table
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.option_checks import check_integer, check_number
from kvcache_plugins.packed.snapshot import PresetChoice
from kvcache_plugins.reports.memory import MemoryReport, measure_memory

from .fidelity import continuation_logits, fill_cache, score_logits


# Tokens that every cache begins to compress
_WARM_UP = 96


def generate_with(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    seed: int = 42,
    streamer: BaseStreamer | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """
    Continue a prompt `[num_tokens]` through a cache, greedily or at a `temperature`, and time it (see `TokenTimer`).
    Return new `token_ids`, seconds to the first token and of a decoded one, `memory` and counters at the end, and
    `was_exercised`.
    """
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_number("temperature", temperature, above=0, is_optional=True)
    set_seed(seed)
    input_ids = token_ids[None].to(model.device)
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    timer = harness.TokenTimer(choose_clock(model.device), on_token)
    output = model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **as_argument(cache),
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([timer]),
        **sampling,
    )
    seconds = timer.seconds_per_token
    return {
        "token_ids": output[0, token_ids.numel() :].tolist(),
        "memory": memory_fields(measure_memory(cache)),
        "stats": harness.cache_stats(cache),
        "prefill_seconds": timer.prefill_seconds,
        "seconds_per_token": seconds,
        "tokens_per_second": 1 / seconds if seconds else None,
        "was_exercised": harness.was_exercised(cache),
    }


def choose_clock(device: torch.device) -> Callable[[], float]:
    """Return the clock for a model's steps: processor time on a CPU, else wall time."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def compare_caches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    token_ids: torch.Tensor,
    caches: Sequence[str],
    *,
    max_new_tokens: int,
    seed: int = 42,
) -> list[dict[str, Any]]:
    """
    Compare caches on one prompt `[num_tokens]`, against `dynamic`, which comes first.

    Rows have `cache` and `error`; unless a cache failed on the way also `text`, `first_difference` (the first token
    that is not the reference's), `kl` (mean KL(dense || cache) along the reference's continuation, in nats),
    `top1_agreement` (the share of it at which both find the same token most likely), and the fields of
    `generate_with`. A wrong spec of a cache is a `ValueError`.
    """
    factories = harness.cache_factories([harness.REFERENCE, *caches], model)
    for factory in factories.values():
        # Load and compile on first use now, so that neither counts as a cache's speed
        with suppress(Exception):
            generate_with(model, token_ids[:_WARM_UP], factory(), max_new_tokens=2)
    rows: list[dict[str, Any]] = []
    dense: dict[str, Any] = {}
    with track_progress(len(factories) * (1 + max_new_tokens)) as announce:

        def measure(name: str) -> dict[str, Any]:
            announce(name)
            generation = generate_with(
                model,
                token_ids,
                factories[name](),
                max_new_tokens=max_new_tokens,
                seed=seed,
                on_token=lambda: announce(name),
            )
            written = torch.tensor(generation["token_ids"], dtype=torch.int64, device="cpu")
            # Nothing follows the last token, so that it is not fed, unless it is the only one
            fed = dense.setdefault("fed", written[: max(1, written.numel() - 1)])
            cache = factories[name]()
            fill_cache(model, token_ids, cache)
            logits = continuation_logits(model, fed, cache)
            targets = dense.setdefault("targets", written[-fed.numel() :])
            score = score_logits(dense.setdefault("logits", logits), logits, targets)
            reference = dense.setdefault("token_ids", generation["token_ids"])
            return {
                "text": str(tokenizer.decode(generation["token_ids"], skip_special_tokens=True)),
                "first_difference": first_difference(reference, generation["token_ids"]),
                "kl": score.kl / score.num_scored,
                "top1_agreement": score.num_agreeing / score.num_scored,
                **generation,
            }

        for name in factories:
            try:
                rows.append({"cache": name, "error": None, **measure(name)})
            except Exception as error:
                # Caches and kernels of other projects raise errors of any kind; rows of other caches are kept
                if name == harness.REFERENCE:
                    raise
                rows.append({"cache": name, "error": f"{type(error).__name__}: {error}"})
    return rows


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or that one text lacks; `None` if texts are equal."""
    return next((index for index, (one, two) in enumerate(zip_longest(reference, other)) if one != two), None)


# Characters of the generated text in a table, and the width from which there is room for them
SHORT_TEXT = 20
TEXT_FROM_WIDTH = 100
_PERCENT = number("", "memory.kv_percent")
_DIFFERENCE = number("", "first_difference", "d", missing="never")
# Numbers of a row; times are processor time on a CPU. A prompt that is too short to compress has no `KV %`
_COLUMNS = (
    Column("differs at", lambda row: "-" if row["error"] else _DIFFERENCE.show(row)),
    number("KL", "kl", ".4f"),
    number("top-1", "top1_agreement", ".3f"),
    number("MB", "memory.total_bytes", ".2f", 1e-6),
    Column("KV %", lambda row: "exact" if row.get("was_exercised") is False else _PERCENT.show(row)),
    number("prefill s", "prefill_seconds", ".2f"),
    number("ms/token", "seconds_per_token", ".0f", 1e3),
)


def summary_line(
    cache: str, num_prompt_tokens: int, generation: Row, memory: MemoryReport, num_known: int | None = None
) -> str:
    """Sum up bytes and speed of one generation in a line, and tokens from a prompt store if there is one."""
    num_new = len(generation["token_ids"])
    held = f"{memory}; the parts `residual` and `dense` are exact"
    if memory.shared:
        held += f", and {sum(memory.shared.values()):,} that all caches of the model share"
    if not generation["was_exercised"]:
        num_tokens = num_prompt_tokens + num_new
        held = f"{num_tokens} tokens: too short to compress, held exact in {memory.total_bytes:,} bytes"
    clock = "processor" if "cpu" in memory.devices else "clock"
    known = "" if num_known is None else f", {num_known} of them from the store,"
    prompt = f"prompt of {num_prompt_tokens} tokens{known} in {generation['prefill_seconds']:.2f} s of {clock} time"
    return f"{cache}: {held}; {prompt}, {num_new} new ones at {_COLUMNS[-1].show(generation)} ms"


def choice_line(choice: PresetChoice) -> str:
    """Name the chosen preset, with its KL and those of presets that were tried before it."""
    failed = [f"{preset} {kl:.4f}" for preset, kl in choice.kl_by_preset.items() if preset != choice.preset]
    others = f"; too far: {', '.join(failed)}" if failed else ""
    return f"{choice.preset} was chosen: KL {choice.kl:.4f}, at most {choice.max_kl:g}{others}"


def _short_text(row: Row) -> str:
    text = f"failed: {row['error']}" if row["error"] else row["text"]
    # A cell cannot hold the character that separates cells
    return shorten(text, SHORT_TEXT, placeholder="...").replace("|", "/")


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Print the rows of a comparison: numbers, bytes by part, and every text as a whole."""
    console = open_console()
    # Whole texts follow, so that a narrow terminal shows numbers alone
    text = Column("text", _short_text, lambda rows: console.width >= TEXT_FROM_WIDTH)
    print_markdown(table(code(), *_COLUMNS, text)(rows), title)
    held = {row["cache"]: {k: v for k, v in row["memory"]["parts"].items() if v} for row in rows if not row["error"]}
    parts = dict.fromkeys(part for sizes in held.values() for part in sizes)
    by_part = table(code(), *(number(part, f"sizes.{part}", ",.1f", 1e-3) for part in parts))
    print_markdown(by_part([{"cache": name, "sizes": sizes} for name, sizes in held.items()]), "kB held, by part")
    for row in rows:
        console.print(f"{row['cache']}:", style="bold", markup=False)
        console.print(f"failed with {row['error']}" if row["error"] else row["text"], markup=False)
        console.print()
