"""The benchmark of pools in memory and on disk: what it fills is what it says, and results are rendered."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kvcache_plugins import cli
from kvcache_plugins.eval.benchmarks.pool import mapped_bytes
from kvcache_plugins.eval.tables.store_tables import render_pool
from kvcache_plugins.files.mapped_files import release
from kvcache_plugins.infinigen.disk_pages import DiskPages


@pytest.fixture
def run(tiny_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + number * number % 90) for number in range(300)), encoding="utf-8")

    def invoke(*arguments):
        options = ["--model", tiny_folder, "--text-file", str(text), "--folder", str(tmp_path), "--read", "100"]
        return CliRunner().invoke(cli.app, ["bench", "pool", *options, "--steps", "3", "--json", *arguments])

    return invoke


def test_rows(run):
    result = run("--context", "1500", "--context", "250", "--cache", "infinigen")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["context"], row["place"]) for row in rows] == [
        (length, place) for length in (1500, 250) for place in ("memory", "disk")
    ]
    assert all(row["stats"]["tokens_cached"] == row["context"] + 3 for row in rows)
    assert all(row["pool_bytes"] > 0 and row["median_s"] > 0 for row in rows)
    assert [row["mapped_bytes"] is None for row in rows] == [True, False, True, False]
    assert render_pool(rows).count("\n") == len(rows) + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--place", "tape"], "`place`"),
        (["--cache", "gear"], "`cache`"),
        (["--folder", "missing"], "`folder`"),
        (["--memory-limit", "much"], "`memory_limit`"),
    ],
)
def test_what_is_refused(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code != 0 and message in result.output


def test_what_is_mapped_is_told(tmp_path):
    disk = DiskPages(tmp_path)
    page = disk.new_page((1, 1, 1024, 256), torch.float32)
    page.fill_(1)
    assert mapped_bytes(tmp_path) == page.nbytes
    release(page)
    assert mapped_bytes(tmp_path) == 0
