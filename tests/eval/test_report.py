"""Reports: figures show what tables do, and the README's are put together from results measured in the same way;
tables in Markdown come from result files, and those of documents are the ones that the files give.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from kvcache_plugins.eval.figures import _draw_fidelity, _draw_steps, _percent_held, draw_result
from kvcache_plugins.eval.report import merge_fidelity, select_drawn
from kvcache_plugins.eval.result_files import read_result
from kvcache_plugins.eval.tables import RENDERERS, print_markdown, render


SETTINGS = {"text_file": "a.txt", "model": "m", "scored": 5, "prefix": 9, "chunk": None}


def make_row(cache: str, percent: float, kl: float, shared: int = 0) -> dict[str, object]:
    memory = {"kv_percent": percent, "kv_percent_with_shared": percent + shared, "total_bytes": 100}
    memory |= {"shared": {"calibration": shared} if shared else {}}
    return {"cache": cache, "kl": kl, "kl_spread": 0.001, "windows": [{}, {}], "memory_after_prefix": memory}


def test_fidelity_is_drawn_with_and_without_shared_bytes(tmp_path):
    rows = [
        make_row("transform-16", 15, 0.02),
        make_row("calibrated-12", 11, 0.02, 6),
        make_row("calibrated-16", 15, 0.006, 6),
    ]
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


def test_the_first_file_with_a_cache_gives_its_row(tmp_path):
    write(tmp_path, "a.json", [make_row("transform-16", 20, 0.1)])
    write(tmp_path, "b.json", [make_row("transform-16", 20, 0.2), make_row("fp8", 20, 0.3)])
    merged = merge_fidelity(tmp_path, ("a.json", "missing.json", "b.json"))
    assert {row["cache"]: row["kl"] for row in merged["rows"]} == {"transform-16": 0.1, "fp8": 0.3}
    write(tmp_path, "c.json", [make_row("fp8", 20, 0.3)], scored=6)
    with pytest.raises(ValueError, match="not measured in the same way"):
        merge_fidelity(tmp_path, ("a.json", "c.json"))


def test_peers_have_separate_lines_and_bits():
    names = [f"{family}-{bits}bit" for family in ("kivi", "quanto", "hqq", "gear") for bits in (2, 4)]
    names += [f"turboquant-{bits}bit" for bits in (2, 3, 4)] + ["llamacpp-q4_0", "llamacpp-q5_1", "llamacpp-q8_0"]
    names += ["transform", *(f"transform-{percent}" for percent in (16, 22, 30)), "fp8"]
    rows = [make_row(name, 10.0 + number, 0.1 / number) for number, name in enumerate(names, start=1)]
    (axes,) = _draw_fidelity({"settings": SETTINGS, "rows": rows}).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["kivi", "quanto", "hqq", "gear", "turboquant", "llamacpp", "transform", "fp8"]
    shown = {text.get_text() for text in axes.texts}
    assert shown == {"2bit", "3bit", "4bit", "q4_0", "q5_1", "q8_0", "16", "22", "transform", "30"}


def test_a_method_of_one_cache_has_its_whole_name_in_the_legend():
    rows = [make_row("turboquant-4bit", 26, 0.05), make_row("transform-16", 15, 0.02), make_row("transform", 24, 0.01)]
    (axes,) = _draw_fidelity({"settings": SETTINGS, "rows": rows}).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["turboquant-4bit", "transform"]
    assert {text.get_text() for text in axes.texts} == {"16", "transform"}


def test_options_and_parts_are_in_tables_alone():
    names = ("transform-16", "transform-22:recent_length=0", "kcvt-4bit", "llamacpp-q4_0")
    drawn = select_drawn({"rows": [make_row(name, 20, 0.1) for name in names]})
    assert [row["cache"] for row in drawn["rows"]] == ["transform-16", "llamacpp-q4_0"]


def test_unmeasured_speed_is_left_blank():
    row = {"cache": "kivi-4bit", "what": "KIVI", "kv_percent": 28.1, "kl": 0.006, "speed_against_dynamic": None}
    assert "| `kivi-4bit` | KIVI | 28.1 | 0.0060 | - |" in RENDERERS["overview"]([row])


@pytest.mark.parametrize("kind", ["step", "kernels", "prompts", "offloading", "batch", "runahead", "overview"])
def test_headings_of_speeds_and_times_state_the_better_direction(kind):
    rows = defaultdict(lambda: 1.0, cache="dynamic", what="prompt", lengths=[1], counted={})
    head = RENDERERS[kind]([rows]).splitlines()[0]
    compared = [each for each in head.strip("| ").split(" | ") if "speed-up" in each or "time /" in each]
    assert compared and "times" not in head
    assert all(each.endswith(("(greater is better)", "(less is better)")) for each in compared)


def test_old_cache_names_are_mapped(tmp_path):
    path = tmp_path / "old.json"
    names = [
        "gear",
        "gear:nbits=2",
        "gear, captured",
        "gear-t25",
        "gear-t16:nbits=2",
        "gear-c12",
        "gear-4bit",
    ]
    content = {"date": "2026-11-27T00:00", "rows": [{"cache": name} for name in [*names, "infinigen-gear"]]}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert [row["cache"] for row in read_result(path)["rows"]] == [
        *("transform", "transform:nbits=2", "transform, captured", "transform", "transform-16:nbits=2"),
        *("calibrated-12", "gear-4bit", "infinigen-transform"),
    ]
    path.write_text(json.dumps({**content, "date": "2026-11-29T00:00"}), encoding="utf-8")
    assert read_result(path)["rows"][0]["cache"] == "gear"


RESULTS = Path(__file__).resolve().parents[2] / "eval" / "results"


@pytest.mark.parametrize("name", ["step_short_smollm2", "fidelity_sinks_smollm2"])
def test_a_report_draws_what_it_prints(name, tmp_path, run):
    shown = run("eval", "report", str(RESULTS / f"{name}.json"), "--figures", str(tmp_path)).stdout
    rows = read_result(RESULTS / f"{name}.json")["rows"]
    assert all(f"| `{row['cache']}` |" in shown for row in rows)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_unrelated_results_are_not_drawn(tmp_path, run) -> None:
    options = [str(RESULTS / "memory_4096_smollm2.json"), "--figures", str(tmp_path)]
    assert "`bench step` or `eval fidelity` only" in run("eval", "report", *options, code=2).stderr


ROOT = Path(__file__).resolve().parents[2]


def test_a_marked_table_is_rendered_from_its_file(tmp_path):
    row = {"cache": "gear-2bit", "ppl_ratio": 1.139, "kl": 0.14, "top1_agreement": 0.8}
    row["memory_after_prefix"] = {"total_bytes": 6_000_000, "kv_percent": 25.8}
    content = {
        "commit": "abc",
        "date": "2026-11-21T00:00",
        "device": "CPU",
        "versions": {"torch": "2"},
        "settings": {},
    }
    (tmp_path / "result.json").write_text(json.dumps({**content, "rows": [row]}), encoding="utf-8")
    text = render("before\n<!-- table: result -->\nold\n<!-- end -->\nafter\n", tmp_path)
    assert "| `gear-2bit` | 6.00 | 25.8 | 1.139 | 0.1400 | 80.0 % |" in text
    assert "old" not in text
    assert text.startswith("before\n<!-- table: result -->\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert render(text, tmp_path) == text


def test_a_missing_result_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json"):
        render("<!-- table: nothing -->\n<!-- end -->", tmp_path)


DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "<!-- table: " in path.read_text(encoding="utf-8")
]


def test_every_kind_of_result_is_rendered():
    results = {
        f"docs/results/{name}.md"
        for name in ("index", "contract", "gear", "gpu", "infinigen_results", "peers", "runahead_results", "speed")
    }
    assert results <= set(DOCUMENTS)


@pytest.mark.parametrize("file", DOCUMENTS)
def test_tables_of_the_documents_are_up_to_date(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert render(text, ROOT / "eval" / "results") == text


def render_rows(folder, kind, rows, **content):
    origin = {"commit": "abc", "date": "2026-11-21T00:00", "device": "GPU", "versions": {"torch": "2"}, "settings": {}}
    (folder / "r.json").write_text(
        json.dumps({"benchmark": kind, **origin, **content, "rows": rows}), encoding="utf-8"
    )
    return render("<!-- table: r -->\n<!-- end -->", folder)


def test_missing_comparisons_are_left_blank(tmp_path):
    spread = {"median_s": 0.02, "lower_quartile_s": 0.01, "upper_quartile_s": 0.03}
    row = {"context": 64, "cache": "infinigen", **spread, "tokens_per_s": 50.0}
    counted = {"bytes_per_token": 4e6, "full_offloading_bytes_per_token": 8e7}
    full = {**row, "time_against_resident": 1.25, "hidden_share": 0.9, "counted": counted}
    text = render_rows(tmp_path, "offloading", [row, {**full, "speed_against_offloaded": 3.5}])
    assert "| 50.0 |  |  |  |  |  |" in text
    assert "| 50.0 | 3.50 | 1.25 | 90 % | 4.0 | 5.0 % |" in text


def test_failures_are_listed_below_the_table(tmp_path):
    row = {"cache": "dynamic", "largest_batch": 40, "tokens_per_s": 1000.4, "bytes_per_sequence": 5e8}
    row |= {"throughput_against_first": 1.0, "peak_bytes": 2**35}
    text = render_rows(tmp_path, "batch", [row], failures=[{"what": "gear-2bit, x", "reason": "skipped: time"}])
    assert "| `dynamic` | 40 | 1000 | 1.00 | 500.0 | 32.00 |" in text
    assert "\nNo row: gear-2bit, x (skipped: time).\n" in text


def test_perplexity_has_a_column_for_every_stretch(tmp_path):
    row = {"cache": "gear-2bit", "memory_at_end": {"total_bytes": 4_300_000}, "ppl": 17.1, "num_scored": 90}
    text = render_rows(tmp_path, "perplexity", [{**row, "stretch": 40, "ppl_by_stretch": [20.0, 18.0, 16.0]}])
    assert "| cache | MB | PPL | to 40 | to 80 | to 90 |" in text
    assert "| `gear-2bit` | 4.30 | 17.100 | 20.00 | 18.00 | 16.00 |" in text


def test_wide_tables_fit_a_terminal(monkeypatch, capsys):
    text = (ROOT / "eval" / "results" / "prefix_8000_smollm2.md").read_text(encoding="utf-8").partition("~ is")[0]
    for width in (60, 80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        print_markdown(text, "Title")
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= width and "…" not in printed
        # Each way keeps its name, also without columns or in another table
        assert printed.count("deepcopy") == printed.count("load and fork") > 0
        assert (printed.count("deepcopy") == 1) == ("871.32 to 1727.88" in printed) == (width == 160)
