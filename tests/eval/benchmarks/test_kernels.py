"""The kernel benchmark measures what it says, and refuses to time what is wrong."""

import pytest
import torch

from kvcache_plugins.eval.benchmarks import kernels
from kvcache_plugins.eval.benchmarks.commands import benchmark_kernels
from kvcache_plugins.eval.benchmarks.kernels import Contest, Shape


SMALL = {"context": 128, "num_heads": 2, "groups": 3, "head_dim": 64, "rounds": 3}


def test_every_cache_has_its_bytes_and_speed():
    content = benchmark_kernels(**SMALL)
    rows = {row["name"]: row for row in content["rows"]}
    assert content["settings"]["kernel"] == "compiled"
    assert rows["dense float32"]["bytes"] == 2 * 2 * 128 * 64 * 4
    assert rows["dense float32"]["speed_against_dense"] == 1
    assert rows["kivi-2bit"]["bytes"] < rows["gear-l-2bit"]["bytes"] < rows["gear-2bit"]["bytes"]
    # Rows of a scale and 32 and 26 bytes, and their tables: order, mean, deviation and widths, deviation and widths
    assert rows["transform"]["bytes"] == 2 * (128 * (2 + 32 + 26) + 64 + 128 + 128 + 8 + 2 + 8)
    assert all(row["lower_quartile_s"] <= row["median_s"] <= row["upper_quartile_s"] for row in rows.values())


@pytest.mark.parametrize("name", ["gear-2bit", "transform-16"])
def test_nothing_is_timed_on_a_mismatch(monkeypatch, name):
    right = kernels.attend

    def wrong(*arguments):
        output = right(*arguments)
        return output if arguments[-1] == "torch" else 1.01 * output

    monkeypatch.setattr(kernels, "attend", wrong)
    with pytest.raises(RuntimeError, match=rf"{name} by the `compiled` kernel is wrong by .*: not timed"):
        benchmark_kernels(**SMALL, cache=[name])


def test_a_dense_kernel_can_be_named():
    contest = Contest(Shape(context=64, num_heads=1, groups=2, head_dim=64), torch.float32, torch.device("cpu"))
    contest.add_backend("flash")
    assert contest.errors["dense float32, flash"] < 1e-6
    rows = {row["name"]: row for row in contest.run(3)}
    # The measure is the faster one
    assert max(rows[name]["speed_against_dense"] for name in ("dense float32", "dense float32, flash")) == 1
    with pytest.raises(RuntimeError):
        contest.add_backend("cuDNN")


def test_tokens_that_stay_exact_are_refused():
    with pytest.raises(ValueError, match="`context` has to be a multiple of 64 for `gear-2bit`"):
        benchmark_kernels(**{**SMALL, "context": 130})
    with pytest.raises(ValueError, match="`context` has to be at least 64 for `transform-16`"):
        benchmark_kernels(**{**SMALL, "context": 63}, cache=["transform-16"])
