"""The README's table and figure are put together from results that were measured in the same way."""

import json

import pytest

from kvcache_plugins.eval.tables.figures import _draw_fidelity
from kvcache_plugins.eval.tables.overview import merge_fidelity, render_overview, select_drawn


SETTINGS = {"text_file": "a.txt", "model": "m", "scored": 5, "prefix": 9, "chunk": None}


def make_row(cache: str, kl: float, percent: float = 20.0) -> dict[str, object]:
    memory = {"kv_percent": percent, "total_bytes": 100}
    return {"cache": cache, "kl": kl, "kl_spread": 0.001, "windows": [{}, {}], "memory_after_prefix": memory}


def write(folder, name, rows, **settings):
    content = {"settings": {**SETTINGS, **settings}, "rows": rows}
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_the_first_that_has_a_cache_counts(tmp_path):
    write(tmp_path, "a.json", [make_row("gear-t16", 0.1)])
    write(tmp_path, "b.json", [make_row("gear-t16", 0.2), make_row("fp8", 0.3)])
    merged = merge_fidelity(tmp_path, ("a.json", "missing.json", "b.json"))
    assert {row["cache"]: row["kl"] for row in merged["rows"]} == {"gear-t16": 0.1, "fp8": 0.3}
    write(tmp_path, "c.json", [make_row("fp8", 0.3)], scored=6)
    with pytest.raises(ValueError, match="not measured in the same way"):
        merge_fidelity(tmp_path, ("a.json", "c.json"))


def test_peers_have_lines_and_bits_of_their_own():
    names = [f"{family}-{bits}bit" for family in ("kivi", "quanto", "hqq", "gear") for bits in (2, 4)]
    names += [f"turboquant-{bits}bit" for bits in (2, 3, 4)] + ["llamacpp-q4_0", "llamacpp-q5_1", "llamacpp-q8_0"]
    names += [f"gear-t{percent}" for percent in (16, 22, 25, 30)] + ["fp8"]
    rows = [make_row(name, 0.1 / number, 10.0 + number) for number, name in enumerate(names, start=1)]
    (axes,) = _draw_fidelity({"settings": SETTINGS, "rows": rows}).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["kivi", "quanto", "hqq", "gear", "turboquant", "llamacpp", "gear-t", "fp8"]
    shown = {text.get_text() for text in axes.texts}
    assert {"2bit", "3bit", "4bit", "q4_0", "q5_1", "q8_0", "16", "22", "25", "30"} <= shown


def test_trellis_codes_and_parts_are_in_tables_alone():
    names = ("gear-t16", "gear-t16-trellis", "gear-t22:quantizer=trellis", "kcvt-4bit", "llamacpp-q4_0")
    drawn = select_drawn({"rows": [make_row(name, 0.1) for name in names]})
    assert [row["cache"] for row in drawn["rows"]] == ["gear-t16", "llamacpp-q4_0"]


def test_what_was_not_measured_is_left_open():
    row = {"cache": "gear-c16", "what": "calibrated", "kv_percent": 15.1, "kv_percent_with_shared": 16.9}
    row |= {"kl": 0.006, "kl_decoded": None, "speed_against_dynamic": None}
    assert "| `gear-c16` | calibrated | 15.1 (16.9) | 0.0060 | - | - |" in render_overview([row])
