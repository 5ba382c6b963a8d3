"""Counts of machine code that are committed are those that the kernels compile to."""

import json
from pathlib import Path

import pytest


COMMITTED = Path(__file__).resolve().parents[3] / "eval" / "results" / "machine_code_sm90.json"
TOLERANCE = 0.05
# One of each kind, as options; the last are all that there are
CASES = {
    "chunks": ("--cache", "kivi-2bit", "--cache", "gear-4bit"),
    "rows": ("--cache", "gear-t25", "--head-dim", "64"),
    "all": (),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_counts_are_those_that_are_committed(case, tmp_path, run_compiling):
    options = [*CASES[case], "--out", str(tmp_path / "counts.json")]
    run_compiling(*options, program=("-m", "kvcache_plugins.cli", "bench", "machine-code"))
    counted, committed = rows_of(tmp_path / "counts.json"), rows_of(COMMITTED)
    assert len(counted) == {"chunks": 2, "rows": 1}.get(case, sum(key[1] == "attention" for key in committed))
    for key, row in counted.items():
        expected = committed[key]["instructions_a_number"]
        assert row["instructions_a_number"] == pytest.approx(expected, rel=TOLERANCE), key
        assert row["spilled"] <= committed[key]["spilled"] + 32, key


def rows_of(path):
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["cache"], row["kernel"], row["head_dim"]): row for row in rows}
