"""`kvcache-plugins eval retrieval`: caches on questions, as a table and as JSON."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.display import make_table, open_console, track_progress
from kvcache_plugins.console.inputs import DeviceOption, DtypeOption, ModelOption, load_for_evaluation
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.caches import cache_factories, with_reference
from kvcache_plugins.registry import check_caches

from .questions import read_questions
from .retrieval import answer_questions


def evaluate_retrieval(
    data_file: Annotated[Path, typer.Option(help="JSON lines of one of the two sets.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,...; repeatable; `dynamic` comes first.")],
    model: ModelOption = "smollm2",
    questions: Annotated[int | None, typer.Option(help="The first so many; all by default.", min=1)] = None,
    records: Annotated[
        int | None, typer.Option(help="Lines or pairs left of each context; all by default.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Questions decoded together.", min=1)] = 1,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> dict[str, Any]:
    """Ask for one line, or one value, of a long context. Each cache is asked.

    \b
    Examples:
        kvcache-plugins eval retrieval --data-file 200_lines.jsonl --cache infinigen --cache h2o
    """
    settings = {name: value for name, value in locals().items() if name != "cache"}
    check_caches(cache)
    asked = read_questions(data_file, records)[:questions]
    if not asked:
        raise ValueError(f"`questions`: there is none in {data_file}, or none was asked for")
    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    factories = cache_factories(with_reference(cache), loaded)
    with track_progress(-(-len(asked) // batch_size) * len(factories)) as announce:
        results = answer_questions(loaded, tokenizer, asked, factories, announce, batch_size)
    columns = {"cache": "name", "right": "number", "+-": "number", "tokens right": "number"}
    cells = [
        (name, f"{each.accuracy:.3f}", f"{each.standard_error:.3f}", f"{each.token_accuracy:.3f}")
        for name, each in results.items()
    ]
    open_console().print(make_table(f"{model} on {data_file.name}, {len(asked)} questions", columns, cells))
    rows = [
        {
            "cache": name,
            "accuracy": each.accuracy,
            "standard_error": each.standard_error,
            "token_accuracy": each.token_accuracy,
            "correct": list(each.correct),
            "stats": each.stats,
        }
        for name, each in results.items()
    ]
    settings |= {"data_file": data_file.name, "num_questions": len(asked)}
    return {"benchmark": "retrieval", **provenance(loaded.device), "settings": settings, "rows": rows}
