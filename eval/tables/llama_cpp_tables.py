"""Markdown tables of `bench llama-cpp`: times of steps and of attention, a line for each cache, a column a context."""

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark_tables import show_milliseconds
from .markdown import make_markdown_table


def render_llama_cpp(rows: Sequence[Mapping[str, Any]]) -> str:
    steps = [row for row in rows if row["part"] == "step"]
    tables = [_render("decode step over", steps)] if steps else []
    attention = [row for row in rows if row["part"] == "attention"]
    for heads in dict.fromkeys((row["num_heads"], row["groups"], row["head_dim"]) for row in attention):
        own = [row for row in attention if (row["num_heads"], row["groups"], row["head_dim"]) == heads]
        tables.append(_render("attention over {} x {} heads of {}".format(*heads), own))
    return "\n".join(tables)


def _render(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Bytes are those of the longest context; a divergence is of what was read, before anything was repeated."""
    contexts = sorted({row["context"] for row in rows})
    has_kl = any("kl_after_reading" in row for row in rows)
    head = [title, *(f"{context} tokens, ms" for context in contexts), f"MB of {contexts[-1]}"]
    cells = []
    for name in dict.fromkeys(row["cache"] for row in rows):
        own = {row["context"]: row for row in rows if row["cache"] == name}
        times = (show_milliseconds(own[context]) if context in own else "-" for context in contexts)
        held = f"{own[contexts[-1]]['bytes'] / 1e6:.1f}" if contexts[-1] in own else "-"
        line = [f"`{name}`", *times, held]
        if has_kl:
            known = [row["kl_after_reading"] for row in own.values() if "kl_after_reading" in row]
            line.append(f"{known[-1]:.4f}" if known else "")
        cells.append(line)
    return make_markdown_table([*head, "KL to Transformers, same text"] if has_kl else head, cells)
