"""What is committed about the machine code is what the kernels compile to."""

import json
from pathlib import Path

import pytest


COMMITTED = Path(__file__).resolve().parents[3] / "eval" / "results" / "machine_code_sm90.json"
TOLERANCE = 0.05
# One of each kind; the command counts the others
CACHES = ("kivi-2bit", "gear-l-4bit", "gear-4bit")


@pytest.mark.slow
def test_counts_are_those_that_are_committed(tmp_path, run_compiling):
    options = [word for cache in CACHES for word in ("--cache", cache)]
    options += ["--out", str(tmp_path / "counts.json")]
    run_compiling(*options, program=("-m", "kvcache_plugins.cli", "bench", "machine-code"))
    counted = {row["cache"]: row for row in json.loads((tmp_path / "counts.json").read_text())["rows"]}
    assert set(counted) == set(CACHES)
    committed = {row["cache"]: row for row in json.loads(COMMITTED.read_text())["rows"]}
    for cache, row in counted.items():
        expected = committed[cache]["instructions_a_number"]
        assert row["instructions_a_number"] == pytest.approx(expected, rel=TOLERANCE), cache
        assert row["spilled"] <= committed[cache]["spilled"] + 32, cache
