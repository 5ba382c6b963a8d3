"""Markdown tables of the benchmarks."""

from collections.abc import Mapping, Sequence
from typing import Any

from .markdown import make_markdown_table


def render_memory(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("cache", "held, MB", "% of 16 bits", "allocated by a decode step, MB", "process peak, MB")
    keys = ("cache_bytes", "decode_step_peak_bytes", "rss_peak")
    cells = []
    for row in rows:
        held, step, peak = (f"{row[key] / 1e6:.1f}" for key in keys)
        cells.append((f"`{row['cache']}`", held, f"{row['kv_percent']:.1f}", step, peak))
    layer = rows[0]["dense_layer_bytes"] / 1e6
    return f"{make_markdown_table(head, cells)}\nKeys and values of one layer, dense: {layer:.1f} MB.\n"


def render_decode(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("context", *(f"`{row['cache']}`, ms a token" for row in rows))
    bins = zip(*(row["bins"] for row in rows), strict=True)
    cells = [(str(each[0]["context"]), *(f"{item['median_s'] * 1e3:.1f}" for item in each)) for each in bins]
    return make_markdown_table(head, cells)


def show_milliseconds(row: Mapping[str, Any]) -> str:
    """Median and quartiles."""
    median, lower, upper = (1e3 * row[key] for key in ("median_s", "lower_quartile_s", "upper_quartile_s"))
    return f"{median:.2f} ({lower:.2f} to {upper:.2f})"


_WAYS = {"prompt": "at once", "chunks": "in chunks of {chunk}", "behind": "behind {context} tokens"}


def render_prompts(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("tokens", "read", "cache", "s (quartiles)", f"times `{rows[0]['cache']}`'s", "% coding", "error of logits")
    cells = [
        (
            str(row["new_tokens"]),
            _WAYS[row["what"]].format_map(row),
            f"`{row['cache']}`",
            "{median_s:.2f} ({lower_quartile_s:.2f} to {upper_quartile_s:.2f})".format_map(row),
            f"{row['time_against_first']:.2f}",
            f"{100 * row['coding_share']:.1f}",
            f"{row['relative_error']:.1e}",
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)


def render_kernels(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("attention over", "MB read", "ms (quartiles)", "% of copy bandwidth", "times dense")
    cells = [
        (
            row["name"],
            f"{row['bytes'] / 1e6:.1f}",
            show_milliseconds(row),
            f"{100 * row['share_of_copy_bandwidth']:.0f}",
            f"{row['speed_against_dense']:.2f}",
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)


def render_step(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["context", "cache", "MB", "ms a token (quartiles)", f"times `{rows[0]['cache']}`"]
    cells = [
        [
            str(row["context"]),
            f"`{row['cache']}`",
            f"{row['bytes'] / 1e6:.1f}",
            show_milliseconds(row),
            f"{row['speed_against_first']:.2f}",
        ]
        for row in rows
    ]
    if any("parts_s" in row for row in rows):
        head.append("of which ms")
        for row, line in zip(rows, cells, strict=True):
            line.append(", ".join(f"{part} {1e3 * each:.1f}" for part, each in row.get("parts_s", {}).items()))
    return make_markdown_table(head, cells)


def render_prefix(rows: Sequence[Mapping[str, Any]]) -> str:
    count = rows[0]["num_continuations"]
    head = (
        "way",
        "cache",
        f"held by all {count}, MB",
        "once, s",
        "each, ms (quartiles)",
        f"all {count} ready, s",
        "its tokens, ms (quartiles)",
        "KL to dense",
        "file, MB",
    )
    cells = []
    for row in rows:
        is_part = row["is_extrapolated"]
        way = f"{row['way']}, {row['num_measured']} measured" if is_part else row["way"]
        once = ", ".join(f"{what} {seconds:.2f}" for what, seconds in row["once_s"].items())
        saved = "" if row["save_s"] is None else f" (save {row['save_s']:.2f})"
        cells.append(
            (
                way,
                f"`{row['cache']}`",
                # What was not measured to the end is marked
                f"{'~ ' if is_part else ''}{row['held_bytes'] / 1e6:.1f}",
                f"{once}{saved}",
                show_milliseconds(row),
                f"{'~ ' if is_part else ''}{row['all_ready_s']:.2f}",
                show_milliseconds(row["tokens_s"]),
                f"{row['kl']:.4f}",
                "" if row["file_bytes"] is None else f"{row['file_bytes'] / 1e6:.1f}",
            )
        )
    table = make_markdown_table(head, cells)
    if any(row["is_extrapolated"] for row in rows):
        table += f"\n~ is the median time, and the mean of the bytes, of those measured, times {count}.\n"
    return table


def render_prediction(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "batch x tokens",
        "cache",
        "MB to read",
        "ms, predicted, not measured",
        "times dense, predicted",
        "launches, not in the time",
    )
    cells = [
        (
            f"{row['batch_size']} x {row['context']}",
            f"`{row['cache']}`",
            f"{row['bytes'] / 1e6:.1f}",
            f"{1e3 * row['predicted_s']:.4f}",
            f"{row['predicted_speed_against_dense']:.2f}",
            "-" if row["launches"] is None else str(row["launches"]),
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)


def render_machine_code(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "cache",
        "kernel",
        "head dim",
        "query heads",
        "warp instructions a number",
        "bits a number",
        "registers",
        "bytes spilled",
        "shared memory",
        "% of copy bandwidth, bound",
        "times dense, bound",
    )
    cells = [
        (
            f"`{row['cache']}`",
            # Coding was not counted at first
            row.get("kernel", "attention"),
            str(row["head_dim"]),
            _or_dash(row["query_heads"], "d"),
            f"{row['instructions_a_number']:.3f}",
            f"{row['bits_a_number']:.2f}",
            str(row["registers"]),
            str(row["spilled"]),
            str(row["shared"]),
            f"{100 * row['share_of_copy_bandwidth']:.0f}",
            _or_dash(row["times_dense"], ".2f"),
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)


def _or_dash(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
