"""`kvcache-plugins eval fidelity`: caches on a text, as a table and as JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import set_seed

from kvcache_plugins.console.display import make_table, open_console, track_progress
from kvcache_plugins.console.inputs import (
    CachesOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    SeedOption,
    load_for_evaluation,
    read_text,
)
from kvcache_plugins.console.results import memory_fields, provenance
from kvcache_plugins.eval.harness.caches import (
    cache_factories,
)
from kvcache_plugins.eval.harness.windows import encode_text, spread_windows
from kvcache_plugins.registry import check_caches

from .fidelity import Fidelity, measure_fidelity


def fidelity_fields(cache: str, fidelity: Fidelity) -> dict[str, object]:
    """A row of a JSON file."""
    numbers = ["ppl", "dense_ppl", "ppl_ratio", "ppl_ratio_spread", "kl", "kl_spread", "top1_agreement", "num_scored"]
    numbers += ["first_difference", "layer_errors", "mean_kv_percent"]
    return {
        "cache": cache,
        **{name: getattr(fidelity, name) for name in numbers},
        "memory_after_prefix": memory_fields(fidelity.memory_after_prefix),
        "memory_at_end": memory_fields(fidelity.memory_at_end),
        "stats": fidelity.stats,
        "windows": [asdict(window) for window in fidelity.windows],
    }


def _fidelity_cells(cache: str, fidelity: Fidelity) -> tuple[str, ...]:
    memory = fidelity.memory_after_prefix
    return (
        cache,
        f"{memory.total_bytes / 1e6:.2f}",
        f"{memory.kv_percent:.1f}",
        f"{memory.kv_percent_with_shared:.1f}" if memory.shared else "-",
        "-" if fidelity.mean_kv_percent is None else f"{fidelity.mean_kv_percent:.1f}",
        f"{memory.compression_ratio:.2f}",
        f"{fidelity.ppl:.3f}",
        f"{fidelity.ppl_ratio:.4f}",
        f"{fidelity.ppl_ratio_spread:.4f}",
        f"{fidelity.kl:.4f}",
        f"{fidelity.kl_spread:.4f}",
        f"{fidelity.top1_agreement:.3f}",
        f"{fidelity.first_difference:g}",
        f"{max(fidelity.layer_errors):.3f}" if fidelity.layer_errors else "-",
    )


_COLUMNS = {
    "cache": "name",
    "MB": "number",
    "KV %": "number",
    "with shared %": "number",
    "mean %": "number",
    "ratio": "number",
    "PPL": "number",
    "x dense": "number",
    "+- PPL": "number",
    "KL": "number",
    "+- KL": "number",
    "top-1": "number",
    "differs at": "number",
    "layer error": "number",
}


def evaluate_fidelity(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: CachesOption,
    model: ModelOption = "smollm2",
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 8,
    prefix: Annotated[int, typer.Option(help="Tokens that fill the cache, unscored.", min=1)] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens scored through the filled cache.", min=1)] = 512,
    chunk: Annotated[
        int | None, typer.Option(help="Scored tokens a forward, 1 for decode; all by default.", min=1)
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 42,
) -> dict[str, Any]:
    """Measure how far caches are from the dense cache on a text.

    That is perplexity, KL and agreement, against bytes held.

    "mean %" is what was held while tokens were scored, buffers included, if they are cut into chunks; "differs at" is
    the first scored token whose most likely one is not the dense cache's, the median over windows;
    "layer error" the largest relative error of a layer's attention output.

    \b
    Examples:
        kvcache-plugins eval fidelity --text-file wiki.test.raw --cache gear --cache kivi-4bit
        kvcache-plugins eval fidelity --text-file book.txt --windows 2 --chunk 1 \\
            --cache gear-2bit --cache gear-2bit:sparsity=0,rank=8 --out eval/results/rank.json
    """
    settings = {name: value for name, value in locals().items() if name != "cache"}
    check_caches(cache)
    text = read_text(text_file, "text_file")
    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    token_ids, start_ids = encode_text(tokenizer, text)
    cut = spread_windows(token_ids, windows, prefix, scored, start_ids)
    factories = cache_factories(list(dict.fromkeys(cache)), loaded)
    set_seed(seed)
    with track_progress(total=len(cut) * len(factories)) as announce:
        results = measure_fidelity(loaded, cut, factories, prefix_length=prefix, chunk=chunk, on_progress=announce)
    rows = sorted(results.items(), key=lambda row: row[1].memory_after_prefix.total_bytes)
    title = (
        f"{model} on {text_file.name}: {windows} windows, {scored} tokens scored after {prefix}; bytes of the prefix"
    )
    open_console().print(make_table(title, _COLUMNS, [_fidelity_cells(*row) for row in rows]))
    settings.update(
        text_file=text_file.name, dtype=str(loaded.dtype).removeprefix("torch."), device=loaded.device.type
    )
    rows_as_json = [fidelity_fields(*row) for row in rows]
    return {**provenance(loaded.device), "settings": settings, "rows": rows_as_json}
