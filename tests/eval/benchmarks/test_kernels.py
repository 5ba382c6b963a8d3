"""The kernel benchmark measures what it says, and refuses to time what is wrong."""

import json

import pytest
import torch

from kvcache_plugins.cli.bench import kernels as command
from kvcache_plugins.eval.benchmarks import contest
from kvcache_plugins.eval.benchmarks import kernels as benchmark_kernels


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
    command.main(**SMALL, out=path)
    content = json.loads(path.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert content["settings"]["kernel"] == "compiled"
    assert rows["dense float32"]["bytes"] == 2 * 2 * 128 * 64 * 4
    assert rows["dense float32"]["speed_against_dense"] == 1
    assert rows["kivi-2bit"]["bytes"] < rows["gear-l-2bit"]["bytes"] < rows["gear-2bit"]["bytes"]
    assert all(row["lower_quartile_s"] <= row["median_s"] <= row["upper_quartile_s"] for row in rows.values())


def test_nothing_is_timed_on_a_mismatch(tmp_path, monkeypatch):
    attend = contest.attend

    def wrong(query, parts, num_heads, kernel="torch"):
        output = attend(query, parts, num_heads)
        return output if kernel == "torch" else output + 0.01 * torch.randn_like(output)

    monkeypatch.setattr(contest, "attend", wrong)
    with pytest.raises(RuntimeError, match=r"gear-2bit by the `compiled` kernel is wrong by .*: not timed"):
        command.main(**SMALL, out=tmp_path / "kernels.json")
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


def test_tokens_that_stay_exact_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`context` has to be a multiple of 64"):
        command.main(**{**SMALL, "context": 130}, out=None)
