"""The benchmark of ways to continue one prefix: bytes that can be told, totals that say what they are, refusals."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kvcache_plugins import cli, create_cache
from kvcache_plugins.eval.benchmarks import prefix as benchmark_prefix
from kvcache_plugins.eval.benchmarks.prefix_ways import Way
from kvcache_plugins.eval.tables.documents import render


PREFIX, COUNT, NEW = 200, 4, 3
# Keys and values of a token, dense, in float32: 2 layers of 2 heads of 32
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 6, encoding="utf-8")
    return tmp_path / "text.txt"


def run(folder, text_file, *arguments):
    options = ["--model", folder, "--text-file", str(text_file), "--prefix", str(PREFIX), "--new-tokens", str(NEW)]
    return CliRunner().invoke(cli.app, ["bench", "prefix", *options, "--continuations", str(COUNT), *arguments])


def test_rows(tiny_folder, text_file, tmp_path):
    out = tmp_path / "prefix.json"
    caches = ["--cache", "gear-k4v3", "--cache", "gear-2bit:rank=2", "--prefill-rounds", "2"]
    result = run(tiny_folder, text_file, *caches, "--out", str(out))
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["benchmark"] == "prefix" and {"commit", "date", "device", "versions"} <= set(content)
    rows = content["rows"]
    ways = ["prefill again", "deepcopy", *["fork", "load and fork"] * 2]
    assert [row["way"] for row in rows] == ways
    assert [row["cache"] for row in rows] == [*["dynamic"] * 2, *["gear-k4v3"] * 2, *["gear-2bit:rank=2"] * 2]
    again, copies, *forks = rows
    # Nothing is shared: all of them are there as often as there are continuations
    assert again["held_bytes"] == copies["held_bytes"] == COUNT * (PREFIX + NEW) * TOKEN_BYTES
    for row in forks:
        # Not even one dense cache, though each of them has its own newest tokens
        assert row["held_bytes"] < (PREFIX + COUNT * 64) * TOKEN_BYTES < copies["held_bytes"]
        assert row["kl"] > 1e-6
    assert again["kl"] == pytest.approx(0, abs=1e-9) and copies["kl"] == 0
    for fork, loaded in zip(forks[::2], forks[1::2], strict=True):
        assert fork["held_bytes"] == loaded["held_bytes"]
        assert fork["kl"] == pytest.approx(loaded["kl"], rel=1e-3)
        assert fork["file_bytes"] is fork["save_s"] is None
        assert loaded["file_bytes"] > 0 < loaded["save_s"]
    assert [(row["num_measured"], row["is_extrapolated"]) for row in rows] == [(2, True), *[(COUNT, False)] * 5]
    assert again["all_ready_s"] == pytest.approx(COUNT * again["median_s"])
    assert [list(row["once_s"]) for row in rows[:4]] == [[], ["prefill"], ["prefill"], ["load"]]
    assert all(row["all_ready_s"] > sum(row["once_s"].values()) for row in rows)


def test_the_bytes_are_those_of_forks(tiny_folder, text_file, tiny_llama, tmp_path):
    out = tmp_path / "prefix.json"
    assert run(tiny_folder, text_file, "--out", str(out)).exit_code == 0
    (held,) = {row["held_bytes"] for row in json.loads(out.read_text())["rows"][2:]}
    cache = create_cache("gear-k4v3", tiny_llama)
    tokens = torch.tensor([[ord(letter) for letter in text_file.read_text()]])
    with torch.no_grad():
        tiny_llama(tokens[:, :PREFIX], past_key_values=cache)
    one = cache.memory().total_bytes
    with torch.no_grad():
        tiny_llama(tokens[:, PREFIX : PREFIX + NEW], past_key_values=cache)
    assert held == one + COUNT * (cache.memory().total_bytes - one)


def test_the_table_says_what_was_not_measured(tiny_folder, text_file, tmp_path):
    assert run(tiny_folder, text_file, "--out", str(tmp_path / "r.json")).exit_code == 0
    table = render("<!-- table: r -->\n<!-- end -->", tmp_path)
    assert f"| held by all {COUNT}, MB |" in table
    assert "| prefill again, 3 measured | `dynamic` | ~ " in table
    assert "| deepcopy | `dynamic` | " in table and "| load and fork | `gear-k4v3` | " in table
    assert f"~ is the median time, and the mean of the bytes, of those measured, times {COUNT}." in table
    assert run(tiny_folder, text_file, "--prefill-rounds", "4", "--out", str(tmp_path / "r.json")).exit_code == 0
    assert "~" not in render("<!-- table: r -->\n<!-- end -->", tmp_path)


def test_ways_that_differ_are_an_error(tiny_llama):
    continuation = torch.arange(5, 10)[None]
    ways = []
    for fill in (3, 4):

        def make(fill=fill):
            cache = create_cache("dynamic", tiny_llama)
            with torch.no_grad():
                tiny_llama(torch.full((1, 20), fill), past_key_values=cache)
            return cache

        ways.append(Way(name=f"fill {fill}", cache="dynamic", make=make, rounds=1))
    with torch.no_grad():
        benchmark_prefix.take_turns(tiny_llama, ways, continuation)
    with pytest.raises(RuntimeError, match="`fill 3` and `fill 4` of `dynamic` differ"):
        benchmark_prefix._check_agreement(ways)
    ways[1].logits = [ways[0].logits[0] * torch.nan]
    with pytest.raises(RuntimeError, match="differ by nan"):
        benchmark_prefix._check_agreement(ways)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "dynamic"], "`cache` has to be a GEAR cache"),
        (["--cache", "geer"], "Unknown cache `geer`"),
        (["--prefill-rounds", "5"], "`prefill_rounds` has to be at most `continuations`, 4, but got 5"),
        (["--new-tokens", "20"], "the text has 264 tokens, but 280 are needed"),
    ],
)
def test_errors_are_one_line(tiny_folder, text_file, arguments, message):
    result = run(tiny_folder, text_file, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
