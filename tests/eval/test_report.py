"""Reports: figures show what tables do, and the README's are put together from results measured in the same way."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcache_plugins import cli
from kvcache_plugins.eval.figures import _draw_fidelity, _draw_steps, _percent_held, draw_result
from kvcache_plugins.eval.report import merge_fidelity, select_drawn
from kvcache_plugins.eval.tables import RENDERERS


SETTINGS = {"text_file": "a.txt", "model": "m", "scored": 5, "prefix": 9, "chunk": None}


def make_row(cache: str, percent: float, kl: float, shared: int = 0) -> dict[str, object]:
    memory = {"kv_percent": percent, "kv_percent_with_shared": percent + shared, "total_bytes": 100}
    memory |= {"shared": {"calibration": shared} if shared else {}}
    return {"cache": cache, "kl": kl, "kl_spread": 0.001, "windows": [{}, {}], "memory_after_prefix": memory}


def test_fidelity_is_drawn_with_and_without_what_is_shared(tmp_path):
    rows = [make_row("gear-t16", 15, 0.02), make_row("gear-c12", 11, 0.02, 6), make_row("gear-c16", 15, 0.006, 6)]
    content = {"settings": SETTINGS, "rows": rows}
    assert draw_result(content, tmp_path / "figure.png").stat().st_size > 1000
    (axes,) = _draw_fidelity(content).axes
    dotted = [line.get_xdata() for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert sorted(map(list, dotted)) == [[11, 17], [15, 21]]
    held = [_percent_held({"settings": {}, "result": row, "memory": None}) for row in rows]
    assert held == [(15, 15), (11, 17), (15, 21)]


def make_step(cache: str, context: int, **more: object) -> dict[str, object]:
    times = {"median_s": 1e-5 * context, "lower_quartile_s": 0.9e-5 * context, "upper_quartile_s": 2e-5 * context}
    return {"cache": cache, "context": context, **times, **more}


def test_steps_over_many_contexts_have_logarithmic_axes():
    content = {"settings": {"model": "m"}, "device": "CPU"}
    near = [make_step("dynamic", context) for context in (1024, 4096)]
    far = [make_step("dynamic", context, part="step") for context in (64, 1024, 16384)]
    alone = [make_step("gear-k4v3", 64, part="attention")]
    (axes,) = _draw_steps({**content, "rows": near}).axes
    assert axes.get_xscale() == "linear" and axes.get_ylim()[0] == 0
    (axes,) = _draw_steps({**content, "rows": far + alone}).axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dynamic"]
    with pytest.raises(ValueError, match="with steps only"):
        _draw_steps({**content, "rows": alone})


def write(folder, name, rows, **settings):
    content = {"settings": {**SETTINGS, **settings}, "rows": rows}
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_the_first_that_has_a_cache_counts(tmp_path):
    write(tmp_path, "a.json", [make_row("gear-t16", 20, 0.1)])
    write(tmp_path, "b.json", [make_row("gear-t16", 20, 0.2), make_row("fp8", 20, 0.3)])
    merged = merge_fidelity(tmp_path, ("a.json", "missing.json", "b.json"))
    assert {row["cache"]: row["kl"] for row in merged["rows"]} == {"gear-t16": 0.1, "fp8": 0.3}
    write(tmp_path, "c.json", [make_row("fp8", 20, 0.3)], scored=6)
    with pytest.raises(ValueError, match="not measured in the same way"):
        merge_fidelity(tmp_path, ("a.json", "c.json"))


def test_peers_have_lines_and_bits_of_their_own():
    names = [f"{family}-{bits}bit" for family in ("kivi", "quanto", "hqq", "gear") for bits in (2, 4)]
    names += [f"turboquant-{bits}bit" for bits in (2, 3, 4)] + ["llamacpp-q4_0", "llamacpp-q5_1", "llamacpp-q8_0"]
    names += [f"gear-t{percent}" for percent in (16, 22, 25, 30)] + ["fp8"]
    rows = [make_row(name, 10.0 + number, 0.1 / number) for number, name in enumerate(names, start=1)]
    (axes,) = _draw_fidelity({"settings": SETTINGS, "rows": rows}).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["kivi", "quanto", "hqq", "gear", "turboquant", "llamacpp", "gear-t", "fp8"]
    shown = {text.get_text() for text in axes.texts}
    assert {"2bit", "3bit", "4bit", "q4_0", "q5_1", "q8_0", "16", "22", "25", "30"} <= shown


def test_trellis_codes_and_parts_are_in_tables_alone():
    names = ("gear-t16", "gear-t16-trellis", "gear-t22:quantizer=trellis", "kcvt-4bit", "llamacpp-q4_0")
    drawn = select_drawn({"rows": [make_row(name, 20, 0.1) for name in names]})
    assert [row["cache"] for row in drawn["rows"]] == ["gear-t16", "llamacpp-q4_0"]


def test_what_was_not_measured_is_left_open():
    row = {"cache": "gear-c16", "what": "calibrated", "kv_percent": 15.1, "kv_percent_with_shared": 16.9}
    row |= {"kl": 0.006, "kl_decoded": None, "speed_against_dynamic": None}
    assert "| `gear-c16` | calibrated | 15.1 (16.9) | - | 0.0060 | - |" in RENDERERS["overview"]([row])


RESULTS = Path(__file__).resolve().parents[2] / "eval" / "results"


@pytest.mark.parametrize("name", ["step_smollm2_cpu", "fidelity_sinks_smollm2"])
def test_a_report_draws_what_it_prints(name, tmp_path):
    options = [str(RESULTS / f"{name}.json"), "--figures", str(tmp_path)]
    finished = CliRunner().invoke(cli.app, ["eval", "report", *options])
    assert finished.exit_code == 0, finished.output
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    assert all(f"| `{row['cache']}` |" in finished.stdout for row in rows)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_no_figure_of_other_results(tmp_path) -> None:
    options = [str(RESULTS / "memory_4096_smollm2.json"), "--figures", str(tmp_path)]
    finished = CliRunner().invoke(cli.app, ["eval", "report", *options])
    assert finished.exit_code == 2 and "`bench step` or `eval fidelity` only" in finished.stderr
