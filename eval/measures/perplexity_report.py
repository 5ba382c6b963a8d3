"""`kvcache-plugins eval perplexity`: caches on a text, as a table and as JSON."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.display import make_table, open_console, track_progress
from kvcache_plugins.console.inputs import DeviceOption, DtypeOption, ModelOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import memory_fields, provenance
from kvcache_plugins.eval.harness.caches import (
    cache_factories,
    with_reference,
)
from kvcache_plugins.eval.harness.windows import encode_text, spread_windows, stretch_stops
from kvcache_plugins.registry import check_caches

from .perplexity import Perplexity, measure_perplexity


def perplexity_fields(cache: str, result: Perplexity) -> dict[str, object]:
    """A row of a JSON file."""
    return {
        "cache": cache,
        "ppl": result.ppl,
        "ppl_by_stretch": result.ppl_by_stretch,
        "stretch": result.stretch,
        "num_scored": result.num_scored,
        "nll": result.nll,
        "memory_at_end": memory_fields(result.memory),
        "stats": result.stats,
    }


def evaluate_perplexity(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,...; repeatable; `dynamic` comes first.")],
    model: ModelOption = "smollm2",
    length: Annotated[int, typer.Option(help="Tokens scored in each window.", min=2)] = 2048,
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 1,
    chunk: Annotated[int, typer.Option(help="Tokens a forward; 1 is decode.", min=1)] = 1,
    stretch: Annotated[int, typer.Option(help="Tokens over which scores are averaged.", min=1)] = 256,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> dict[str, Any]:
    """Perplexity against position. Texts are decoded through each cache from the first token on.

    \b
    Examples:
        kvcache-plugins eval perplexity --text-file book.txt --cache gear --cache kivi-4bit --chunk 64
    """
    settings = {name: value for name, value in locals().items() if name != "cache"}
    settings["text_file"] = text_file.name
    check_caches(cache)
    text = read_text(text_file, "text_file")
    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    token_ids, start_ids = encode_text(tokenizer, text)
    # One token comes before the first that is scored
    cut = spread_windows(token_ids, windows, 1 + len(start_ids), length - 1 - len(start_ids), start_ids)
    factories = cache_factories(with_reference(cache), loaded)
    with track_progress(len(cut) * len(factories)) as announce:
        results = measure_perplexity(loaded, cut, factories, chunk=chunk, stretch=stretch, on_progress=announce)
    headings = [f"to {stop}" for stop in stretch_stops(stretch, cut[0].numel() - 1)]
    cells = [
        [
            name,
            f"{each.memory.total_bytes / 1e6:.2f}",
            f"{each.ppl:.3f}",
            *(f"{ppl:.2f}" for ppl in each.ppl_by_stretch),
        ]
        for name, each in results.items()
    ]
    columns = {"cache": "name", **dict.fromkeys(["MB", "PPL", *headings], "number")}
    open_console().print(make_table(f"{model}, {length} tokens of {text_file.name}", columns, cells))
    rows = [perplexity_fields(name, each) for name, each in results.items()]
    return {"benchmark": "perplexity", **provenance(loaded.device), "settings": settings, "rows": rows}
