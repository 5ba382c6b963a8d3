"""How `kvcache-plugins compare` and `generate` show what `comparison` finds: tables, and one line."""

from collections.abc import Sequence
from textwrap import shorten

from kvcache_plugins.console.display import make_table, open_console
from kvcache_plugins.gear.config import PresetChoice

from .comparison import ComparisonRow
from .generation import Generation


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
