"""Tables in Markdown come from result files, and those in the README are the ones that the files give."""

import json
from pathlib import Path

import pytest

from kvcache_plugins.eval.tables import print_markdown, render


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


def test_what_failed_is_shown(tmp_path):
    row = {"cache": "dynamic", "largest_batch": 40, "tokens_per_s": 1000.4, "bytes_per_sequence": 5e8}
    row |= {"throughput_against_first": 1.0, "peak_bytes": 2**35}
    text = render_rows(tmp_path, "batch", [row], failures=[{"what": "gear-2bit, x", "reason": "skipped: time"}])
    assert "| `dynamic` | 40 | 1000 | 1.00 | 500.0 | 32.00 |" in text
    assert "\nNo row: gear-2bit, x (skipped: time).\n" in text


def test_perplexity(tmp_path):
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
        # Whatever is left out or put into another table, each way has its name
        assert printed.count("deepcopy") == printed.count("load and fork") > 0
        assert (printed.count("deepcopy") == 1) == ("871.32 to 1727.88" in printed) == (width == 160)
