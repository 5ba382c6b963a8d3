"""
Comparison of bytes, KL and speed of caches with a table frozen at an older commit, which changes may not exceed.

    make promises                                          # all three
    python -m kvcache_plugins.eval.promises bytes fidelity # some of them

- bytes: `memory()` of every registered cache on a tiny model, to the byte or fewer.
- fidelity: KL to the dense cache on SmolLM2, behind a prompt and decoded 16 tokens at a time, at most 3 % and .0002
  more.
- speed: decode steps of SmolLM2, one thread, in turns with `dynamic`, at least .94 of the frozen ratio; on a quiet
  machine.

The table is `eval/results/promises/frozen.json`. A promise that is given up on purpose is removed from it by hand,
with the reason under `given_up`. A cache that has another name now, or is an option of another (`name:key=value`), is
under `renamed`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.reference_model import load_model
from kvcache_plugins.registry import create_cache

from .benchmarks.step import llama, random_model, time_steps
from .harness import cache_factories
from .measures.fidelity import measure_fidelity as compare_distributions


FOLDER = Path(__file__).parent / "results" / "promises"
_LENGTHS = (5, 70, 300, 1024)
# Tokens decoded behind each of them
_DECODED = 30
_PROMPT, _SCORED = 768, 256
_STEPS, _WARM_UP = 24, 4


@torch.no_grad()
def measure_bytes(frozen: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Measure bytes of the frozen table's caches by the length of the prompt; an error's name instead of a number."""
    model = random_model(llama(300, 256, 256, 2, 4, 2, 4096, head_dim=64), torch.float32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 299, (1, max(_LENGTHS) + _DECODED), generator=generator, device="cpu")
    measured: dict[str, dict[str, Any]] = {}
    for name in frozen:
        row = measured[name] = {}
        for length in _LENGTHS:
            try:
                cache: Any = create_cache(name, model)
                model(ids[:, :length], **as_argument(cache))
                for at in range(length, length + _DECODED):
                    model(ids[:, at : at + 1], **as_argument(cache))
                row[str(length)] = cache.memory().total_bytes if hasattr(cache, "memory") else None
            # The table also has the errors of caches that this model or machine cannot have
            except (ValueError, ImportError, AttributeError) as error:
                row[str(length)] = type(error).__name__
    return measured


def _load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    model, tokenizer = load_model("smollm2")
    return model.float().eval(), tokenizer, (FOLDER / "text.txt").read_text(encoding="utf-8")


def measure_fidelity(frozen: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Measure the KL of the frozen table's caches after a prompt, and decoded 16 tokens at a time."""
    model, tokenizer, text = _load()
    windows = [tokenizer(text[at:], return_tensors="pt").input_ids[0, : _PROMPT + _SCORED + 1] for at in (0, 9000)]
    factories = cache_factories(list(frozen), model)
    found = {
        mode: compare_distributions(
            model, windows, factories, prefix_length=_PROMPT, chunk=chunk, on_progress=typer.echo
        )
        for mode, chunk in (("prompt", _SCORED), ("decoded", 16))
    }
    return {name: {mode: round(of[name].kl, 6) for mode, of in found.items()} for name in frozen}


@torch.no_grad()
def measure_speed(frozen: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Measure decode steps of the frozen table's caches, as speed-ups over `dynamic`, by length of the context."""
    torch.set_num_threads(1)
    model, tokenizer, text = _load()
    ids = tokenizer(text * 3, return_tensors="pt").input_ids
    measured = {}
    for context, names in ((int(key), list(row)) for key, row in frozen.items()):
        caches = {name: create_cache(name, model) for name in ("dynamic", *names)}
        for cache in caches.values():
            model(ids[:, :context], **as_argument(cache), logits_to_keep=1)
        warm_up, timed = ids[:, context : context + _STEPS].split((_WARM_UP, _STEPS - _WARM_UP), dim=1)
        list(time_steps(model, caches, warm_up, context))
        found: list[Any] = list(time_steps(model, caches, timed, context + _WARM_UP))
        measured[str(context)] = {row["cache"]: round(row["speed_against_first"], 3) for row in found[1:]}
        typer.echo(f"speed {context} {measured[str(context)]}")
    return measured


MEASURES: dict[str, Callable[[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]]] = {
    "bytes": measure_bytes,
    "fidelity": measure_fidelity,
    "speed": measure_speed,
}


# Allowed loss of a frozen number; bytes are `None` for a cache that was refused
_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "bytes": lambda before, after: not isinstance(before, int) or (isinstance(after, int) and after <= before),
    "fidelity": lambda before, after: after is not None and after <= before * 1.03 + 0.0002,
    "speed": lambda before, after: after is not None and after >= before * 0.94,
}
_LOST = {
    "bytes": "bytes of {outer} after {inner} tokens: {before} -> {after}",
    "fidelity": "KL of {outer}, {inner}: {before} -> {after}",
    "speed": "speed-up of {inner} over `dynamic` at {outer} tokens: {before} -> {after}",
}


def _as_named_now(frozen: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    """List the frozen rows of a part under the names that caches have now."""
    now = frozen["renamed"]
    return {
        now.get(outer, outer): {now.get(inner, inner): value for inner, value in row.items()}
        for outer, row in frozen[part].items()
    }


def losses(frozen: dict[str, Any], measured: dict[str, Any]) -> Iterator[str]:
    """Yield a line for every frozen number that a measured one exceeds."""
    for part, found in measured.items():
        for outer, row in _as_named_now(frozen, part).items():
            for inner, before in row.items():
                after = found.get(outer, {}).get(inner)
                if not _HOLDS[part](before, after):
                    yield _LOST[part].format(outer=outer, inner=inner, before=before, after=after)


def main(parts: list[str]) -> int:
    """Measure some parts, or all, and print broken promises; return 1 if there are any."""
    frozen = json.loads((FOLDER / "frozen.json").read_text(encoding="utf-8"))
    measured = {part: MEASURES[part](_as_named_now(frozen, part)) for part in parts or MEASURES}
    lost = list(losses(frozen, measured))
    typer.echo("\n".join(lost) or f"all promises of {', '.join(measured)} hold")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
