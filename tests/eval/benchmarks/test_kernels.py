"""The kernel benchmark measures what it says, and refuses to time what is wrong."""

import json

import pytest
import torch

from kvcache_plugins.console.results import with_results
from kvcache_plugins.eval.benchmarks import contest
from kvcache_plugins.eval.benchmarks import kernels as benchmark_kernels


command = with_results(benchmark_kernels.benchmark_kernels)


SMALL = {
    "context": 128,
    "batch_size": 1,
    "num_heads": 2,
    "groups": 3,
    "head_dim": 64,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": None,
    "rounds": 3,
}


def test_writes_rows_with_their_provenance(tmp_path):
    path = tmp_path / "kernels.json"
    command(**SMALL, out=path)
    content = json.loads(path.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert content["settings"]["kernel"] == "compiled"
    assert rows["dense float32"]["bytes"] == 2 * 2 * 128 * 64 * 4
    assert rows["dense float32"]["speed_against_dense"] == 1
    assert rows["kivi-2bit"]["bytes"] < rows["gear-l-2bit"]["bytes"] < rows["gear-2bit"]["bytes"]
    # Rows of a scale and 32 and 26 bytes, and their tables: order, mean, deviation and widths, deviation and widths
    assert rows["gear-t25"]["bytes"] == 2 * (128 * (2 + 32 + 26) + 64 + 128 + 128 + 8 + 2 + 8)
    assert all(row["lower_quartile_s"] <= row["median_s"] <= row["upper_quartile_s"] for row in rows.values())


def test_nothing_is_timed_on_a_mismatch(tmp_path, monkeypatch):
    attend = contest.attend

    def wrong(query, parts, num_heads, scale=None, kernel="torch"):
        output = attend(query, parts, num_heads)
        return output if kernel == "torch" else output + 0.01 * torch.randn_like(output)

    monkeypatch.setattr(contest, "attend", wrong)
    with pytest.raises(RuntimeError, match=r"gear-2bit by the `compiled` kernel is wrong by .*: not timed"):
        command(**SMALL, out=tmp_path / "kernels.json")
    assert not (tmp_path / "kernels.json").exists()


def test_a_dense_kernel_can_be_named():
    shape = benchmark_kernels.Shape(context=64, num_heads=1, groups=2, head_dim=64)
    contest = benchmark_kernels.Contest(shape, torch.float32, torch.device("cpu"))
    contest.add_backend("flash")
    assert contest.errors["dense float32, flash"] < 1e-6
    rows = {row["name"]: row for row in contest.run(3)}
    dense = [rows[name] for name in ("dense float32", "dense float32, flash")]
    # The measure is the faster one
    assert max(row["speed_against_dense"] for row in dense) == 1
    with pytest.raises(RuntimeError):
        contest.add_backend("cuDNN")


def test_tokens_that_stay_exact_are_refused():
    with pytest.raises(ValueError, match="`context` has to be a multiple of 64 for `gear-2bit`"):
        command(**{**SMALL, "context": 130}, out=None)
    with pytest.raises(ValueError, match="`context` has to be at least 64 for `gear-t16`"):
        command(**{**SMALL, "context": 63}, cache=["gear-t16"], out=None)


def test_a_wrong_kernel_for_rows_is_not_timed(monkeypatch):
    attend = contest.attend_coded

    def wrong(*arguments):
        output = attend(*arguments)
        return output if arguments[-1] == "torch" else 1.01 * output

    monkeypatch.setattr(contest, "attend_coded", wrong)
    with pytest.raises(RuntimeError, match=r"gear-t16 by the `compiled` kernel is wrong by .*: not timed"):
        command(**SMALL, cache=["gear-t16"], out=None)
