"""Tables in Markdown come from result files, and those in the README are the ones that the files give."""

import json
from pathlib import Path

import pytest

from kvcache_plugins.eval.tables import RENDERERS, print_markdown, render, render_llama_cpp, render_shapes


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


def test_results_are_shown():
    results = {
        f"docs/results/{name}.md" for name in ("contract", "gear", "infinigen_results", "peers", "runahead_results")
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


def test_what_was_not_compared_is_left_blank(tmp_path):
    spread = {"median_s": 0.02, "lower_quartile_s": 0.01, "upper_quartile_s": 0.03}
    row = {"context": 64, "cache": "infinigen", **spread, "tokens_per_s": 50.0}
    counted = {"bytes_per_token": 4e6, "full_offloading_bytes_per_token": 8e7}
    full = {**row, "time_against_resident": 1.25, "hidden_share": 0.9, "counted": counted}
    text = render_rows(tmp_path, "offloading", [row, {**full, "speed_against_offloaded": 3.5}])
    assert "| 50.0 |  |  |  |  |  |" in text
    assert "| 50.0 | 3.50 | 1.25 | 90 % | 4.0 | 5.0 % |" in text


def test_a_search_cut_short_and_what_failed_are_shown(tmp_path):
    row = {"way": "read", "cache": "dynamic", "largest_batch": 40, "tokens_per_s": 1000.4, "bytes_per_sequence": 5e8}
    row |= {"throughput_against_first": 1.0, "peak_bytes": 2**35, "search": "complete"}
    rows = [row, {**row, "cache": "gear-2bit", "search": "cut short: time"}]
    text = render_rows(tmp_path, "batch", rows, failures=[{"what": "gear-2bit, x", "reason": "skipped: time"}])
    assert "| read | `dynamic` | 40 | 1000 | 1.00 | 500.0 | 32.00 |" in text
    assert "| read | `gear-2bit` | at least 40 |" in text
    assert "\nNo row: gear-2bit, x (skipped: time).\n" in text


def render_fidelity_rows(tmp_path, rows):
    return render_rows(tmp_path, "fidelity", rows)


def test_fetched_tokens_have_a_column_where_a_cache_fetches(tmp_path):
    common = {"ppl_ratio": 1.0, "kl": 0.01, "top1_agreement": 0.9}
    stats = {"infinigen": {"tokens_fetched": 97, "tokens_fetchable": 1000}, "h2o": {"tokens_kept": 5}}
    rows = [
        {"cache": name, **common, "memory_after_prefix": {"total_bytes": 1e6, "kv_percent": 10.0}, "stats": each}
        for name, each in stats.items()
    ]
    text = render_fidelity_rows(tmp_path, rows)
    assert "| same top token | % of tokens fetched |" in text
    assert "| `infinigen` | 1.00 | 10.0 | 1.000 | 0.0100 | 90.0 % | 9.7 |" in text
    assert "| `h2o` | 1.00 | 10.0 | 1.000 | 0.0100 | 90.0 % | - |" in text


def test_bytes_fetched_are_set_against_whole_layers_at_16_bits(tmp_path):
    common = {"ppl_ratio": 1.0, "kl": 0.01, "kl_spread": 0.0, "top1_agreement": 0.9, "mean_kv_percent": 20.0}
    # A cache of 1000 and then of 1200 bytes at 16 bits, read ten times
    held = {
        "memory_after_prefix": {"total_bytes": 200, "kv_percent": 20.0},
        "memory_at_end": {"total_bytes": 360, "kv_percent": 30.0},
    }
    stats = {"tokens_fetched": 97, "tokens_fetchable": 1000, "bytes_fetched": 550}
    rows = [{"cache": "coded", **common, **held, "stats": stats, "windows": [{"num_scored": 3}, {"num_scored": 10}]}]
    text = render_fidelity_rows(tmp_path, rows)
    assert "| % of 16 bits | % while decoding | PPL / dense |" in text
    assert "| 20.0 | 20.0 | 1.000 |" in text
    assert "| 9.7 | 5.00 |" in text


def test_what_all_caches_share_has_a_column_where_there_is_something(tmp_path):
    common = {"ppl_ratio": 1.0, "kl": 0.01, "top1_agreement": 0.9, "stats": {}}
    held = {"total_bytes": 1e6, "kv_percent": 10.0}
    rows = [
        {"cache": "gear-c12", **common, "memory_after_prefix": {**held, "shared": {"calibration": 9}}},
        {"cache": "gear-t16", **common, "memory_after_prefix": {**held, "shared": {}}},
        {"cache": "from-before", **common, "memory_after_prefix": held},
    ]
    rows[0]["memory_after_prefix"]["kv_percent_with_shared"] = 14.0
    text = render_fidelity_rows(tmp_path, rows)
    assert "| % of 16 bits | % with what all caches share | PPL / dense |" in text
    assert "| `gear-c12` | 1.00 | 10.0 | 14.0 | 1.000 |" in text
    assert "| `gear-t16` | 1.00 | 10.0 | 10.0 | 1.000 |" in text
    assert "| `from-before` | 1.00 | 10.0 | 10.0 | 1.000 |" in text
    assert "share" not in render_fidelity_rows(tmp_path, rows[1:])


TIMES = {"median_s": 2.0, "lower_quartile_s": 1.5, "upper_quartile_s": 2.5}


def test_runahead_over_one_link_and_two(tmp_path):
    row = {**TIMES, "length": 64, "method": "planned", "lengths": [40, 24], "speed_against_one_rank": 1.8}
    row |= {"bytes_sent": 3_200_000, "link": "full"}
    text = render_rows(tmp_path, "runahead", [row])
    assert "| 64 | planned | 40 + 24 | 2.00 (1.50 to 2.50) | 1.80 | 3.2 |" in text
    text = render_rows(tmp_path, "runahead", [row, {**row, "link": "throttled", "seconds_against_full": 1.04}])
    assert "| 1.80 | 3.2 | full | - |" in text and "| 1.80 | 3.2 | throttled | 1.040 |" in text


def test_simulations(tmp_path):
    row = {"lengths": [40, 24], "measured_s": 2.0, "simulated_s": 1.9, "simulated_against_measured": 0.95}
    assert "| 40 + 24 | 2.000 | 1.900 | 0.950 |" in render_rows(tmp_path, "runahead-simulation", [row])
    row = {"lengths": [40, 24], "length": 64, "gb_s": 10.0, "num_ranks": 4}
    row |= {"one_rank_s": 2.0, "tsp_s": 1.5, "runahead_s": 1.0}
    text = render_rows(tmp_path, "runahead-simulation", [row])
    assert "| 64 | 10 | 4 | 2.000 | 1.500 | 1.000 | 2 | 1.50 |" in text


def test_perplexity_and_lm_eval(tmp_path):
    row = {"cache": "gear-2bit", "memory_at_end": {"total_bytes": 4_300_000}, "ppl": 17.1, "num_scored": 90}
    text = render_rows(tmp_path, "perplexity", [{**row, "stretch": 40, "ppl_by_stretch": [20.0, 18.0, 16.0]}])
    assert "| cache | MB | PPL | to 40 | to 80 | to 90 |" in text
    assert "| `gear-2bit` | 4.30 | 17.100 | 20.00 | 18.00 | 16.00 |" in text
    row = {**TIMES, "model": "hf", "speed_against_hf": 1.0, "largest_difference": 4e-5}
    text = render_rows(
        tmp_path, "lm-eval", [{**row, "largest_relative_difference": 1e-6, "same_picks": 9, "num_items": 10}]
    )
    assert "| hf | 2.00 (1.50 to 2.50) | 1.00 | 4.0e-05 | 1.0e-06 | 9 of 10 |" in text


def make_time(cache: str, context: int, **more: object) -> dict[str, object]:
    times = {"median_s": 0.002, "lower_quartile_s": 0.001, "upper_quartile_s": 0.003}
    return {"part": "step", "cache": cache, "context": context, "bytes": 1e6 * context, **times, **more}


def test_columns_are_contexts():
    rows = [make_time("dynamic", 4), make_time("dynamic", 9), make_time("llama.cpp f16", 9, kl_after_reading=0.0001)]
    lines = render_llama_cpp(rows).splitlines()
    assert lines[0] == "| decode step over | 4 tokens, ms | 9 tokens, ms | MB of 9 | KL to Transformers, same text |"
    assert lines[2] == "| `dynamic` | 2.00 (1.00 to 3.00) | 2.00 (1.00 to 3.00) | 9.0 |  |"
    assert lines[3] == "| `llama.cpp f16` | - | 2.00 (1.00 to 3.00) | 9.0 | 0.0001 |"


def test_heads_have_a_table_each():
    heads = [{"num_heads": 3, "groups": 3, "head_dim": 64}, {"num_heads": 8, "groups": 4, "head_dim": 128}]
    rows = [make_time("gear-k4v3", 64, **each) | {"part": "attention"} for each in heads]
    text = render_llama_cpp(rows)
    assert "attention over 3 x 3 heads of 64" in text and "attention over 8 x 4 heads of 128" in text
    assert "KL" not in text


def make_rows(part: str, first: str, context: int, speeds: dict[str, float]) -> list[dict[str, object]]:
    place = {"part": part, "shape": "mqa", "dtype": "float32", "batch_size": 8, "num_threads": 2, "context": context}
    return [
        {**place, "cache": name, "median_s": 0.01 / speed, "speed_against_first": speed}
        for name, speed in {first: 1.0, **speeds}.items()
    ]


def test_a_line_a_kind_and_a_column_a_context():
    rows = make_rows("step", "dynamic", 64, {"gear-k4v3": 0.97, "gear-t22": 0.99})
    rows += make_rows("step", "dynamic", 4096, {"gear-k4v3": 2.0, "gear-t22": 1.5})
    lines = render_shapes(rows).splitlines()
    assert "`gear-k4v3` / `gear-t22`" in lines[0]
    assert lines[2] == "| heads | dtype | batch | threads | 64 tokens | 4096 tokens |"
    assert lines[4] == "| mqa | float32 | 8 | 2 | 10.00: **0.97** / 0.99 | 10.00: 2.00 / 1.50 |"
    assert "`gear-k4v3` in 1 of 2, at worst 0.97 times as fast; `gear-t22` in 0 of 2" in lines[-1]


def test_attention_stands_in_a_table_of_its_own():
    rows = make_rows("attention", "dense float32", 64, {"gear-k4v3": 0.5})
    rows += make_rows("step", "dynamic", 1, {"gear-k4v3": 1.0})
    text = render_shapes(rows)
    assert text.index("whole steps") < text.index("attention alone")
    assert "10.00: **0.50**" in text


def test_wide_tables_fit_a_terminal(monkeypatch, capsys):
    rows = json.loads((ROOT / "eval" / "results" / "prefix_8000_smollm2.json").read_text(encoding="utf-8"))["rows"]
    for width in (60, 80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        print_markdown(RENDERERS["prefix"](rows), "Title")
        printed = capsys.readouterr().out
        lines = [line for line in printed.splitlines() if not line.startswith("~")]
        assert max(map(len, lines)) <= width and "…" not in printed
        # Whatever is left out or put into another table, each way has its name
        assert printed.count("deepcopy") == printed.count("load and fork") > 0
        assert (printed.count("deepcopy") == 1) == ("871.32 to 1727.88" in printed) == (width == 160)
