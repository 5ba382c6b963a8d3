"""The script for a GPU runs from end to end, at small sizes and in Triton's interpreter; failures are in its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcache_plugins.eval.gpu import command, parts
from kvcache_plugins.eval.gpu.command import TINY
from kvcache_plugins.eval.gpu.report import PartialReport, Run, TimeBox
from kvcache_plugins.gear.kernel_check import MismatchError
from kvcache_plugins.registry import describe_caches


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture
def triton_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")


@pytest.fixture
def replace_children(monkeypatch):
    """Has a function called for what would be a Python process; other programs (git) run."""
    run = subprocess.run

    def replace(function):
        def replaced(command, **options):
            return function(command, **options) if command[0] == sys.executable else run(command, **options)

        monkeypatch.setattr(subprocess, "run", replaced)

    return replace


def run_tiny(part: str, folder: Path) -> None:
    command.run_on_gpu(out=folder, limit=300.0, tiny=True, part=part)


def test_attention_alone(tmp_path, triton_kernels):
    run_tiny("attention", tmp_path)
    content = read(tmp_path, "gpu_attention_large")
    assert content["failures"] == []
    assert content["settings"]["kernel"] == "triton"
    rows = {row["name"]: row for row in content["rows"]}
    assert {"dense bfloat16", "gear-2bit", "gear-l-2bit", "gear-t25", "copy"} <= set(rows)
    assert 0 < rows["gear-2bit"]["relative_error"] < 5e-3


def test_every_preset_is_checked(tmp_path, triton_kernels):
    run_tiny("presets", tmp_path)
    content = read(tmp_path, "gpu_presets")
    assert content["failures"] == []
    assert [row["cache"] for row in content["rows"]] == list(TINY["presets"]["presets"])
    assert all(0 < row["relative_error"] < 5e-3 for row in content["rows"])
    ours = [entry.name for entry in describe_caches() if str(entry.factory).endswith(":GEARCache")]
    assert len(ours) > 9 and {*ours} <= {*parts.PRESETS}


def test_shares_of_the_time_are_all_of_it():
    assert sum(share for _, share in command.PARTS.values()) == pytest.approx(1.0)


def test_steps_of_a_model(tmp_path, triton_kernels):
    run_tiny("step", tmp_path)
    content = read(tmp_path, "gpu_step")
    assert [row["cache"] for row in content["rows"]] == ["dynamic", "gear", "gear-2bit", "static"]
    assert [failure["what"] for failure in content["failures"]] == ["no-such-cache"]
    for stats in (row["stats"] for row in content["rows"][1:3]):
        assert stats["kernel_fallbacks"] == stats["dense_reads"] == 0 < stats["fused_calls"]
    assert all(row["tokens_per_s"] > 0 and row["prefill_s"] > 0 for row in content["rows"])


def test_captured_steps(tmp_path):
    run_tiny("captured", tmp_path)
    content = read(tmp_path, "gpu_captured")
    assert content["failures"] == []
    rows = {row["cache"]: row for row in content["rows"]}
    assert list(rows) == ["dynamic", "gear", "gear, captured"]
    # It has room for what is to come
    assert rows["gear, captured"]["bytes"] > rows["gear"]["bytes"]


def test_offloading(tmp_path):
    run_tiny("infinigen", tmp_path)
    content = read(tmp_path, "gpu_infinigen")
    # There is nothing to offload to where there is no GPU
    assert [failure["what"] for failure in content["failures"]] == ["offloaded"]
    rows = {row["cache"]: row for row in content["rows"]}
    choosing = ["infinigen:share=0.1", "infinigen-gear:share=0.1"]
    assert list(rows) == ["dynamic", *(name + more for name in choosing for more in ("", ", all resident"))]
    counted, of_codes = (rows[name]["counted"] for name in choosing)
    # Of four layers two are whole, of the others about a tenth is fetched
    assert 0.04 < counted["bytes_per_token"] / counted["full_offloading_bytes_per_token"] < 0.07
    assert of_codes["bytes_per_token"] < counted["bytes_per_token"] / 5
    assert of_codes["full_offloading_bytes_per_token"] == counted["full_offloading_bytes_per_token"]
    assert rows["infinigen:share=0.1"]["time_against_resident"] > 0
    assert rows["infinigen:share=0.1"]["hidden_share"] == 0.0


@pytest.mark.long
def test_largest_batch(tmp_path, triton_kernels):
    run_tiny("batch", tmp_path)
    content = read(tmp_path, "gpu_largest_batch")
    assert content["failures"] == []
    dynamic, gear = content["rows"]
    assert dynamic["largest_batch"] == 1 < gear["largest_batch"]
    assert gear["peak_bytes"] <= content["settings"]["budget_bytes"]


def test_a_mismatch_is_noted_and_not_timed(tmp_path, triton_kernels, monkeypatch):
    add = parts.Contest.add

    def wrong(self, cache_name):
        if cache_name == "gear-2bit":
            raise MismatchError("gear-2bit is wrong by 1.0e+00: not timed")
        add(self, cache_name)

    monkeypatch.setattr(parts.Contest, "add", wrong)
    run_tiny("attention", tmp_path)
    content = read(tmp_path, "gpu_attention_large")
    assert "gear-2bit is wrong" in content["failures"][0]["reason"]
    names = [row["name"] for row in content["rows"]]
    assert "gear-l-2bit" in names and "gear-2bit" not in names


def test_parts_that_fail_or_hang_do_not_end_the_run(tmp_path, replace_children):
    commands = []

    def run(command, *, timeout, env, **options):
        commands.append(command)
        assert timeout > 0
        part = command[command.index("--part") + 1]
        if part == "attention":
            raise subprocess.TimeoutExpired(command, timeout)
        if part == "step":
            raise subprocess.CalledProcessError(-11, command)

    replace_children(run)
    command.run_on_gpu(out=tmp_path, limit=500.0, tiny=True)
    assert [command[command.index("--part") + 1] for command in commands] == list(command.PARTS)
    assert all("--tiny" in command for command in commands)
    content = read(tmp_path, "gpu_run")
    assert [row["part"] for row in content["rows"]] == list(command.PARTS)
    # What a part leaves goes to the next one
    assert [round(row["limit"]) for row in content["rows"]] == [80, 150, 250, 320, 375, 440, 500]
    reasons = {failure["what"]: failure["reason"] for failure in content["failures"]}
    assert set(reasons) == {"attention", "step"}
    assert reasons["attention"].startswith("skipped: time")
    assert "SIGSEGV" in reasons["step"]


def test_outcomes_of_tests_are_counted(tmp_path):
    (tmp_path / "r.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><skipped/></testcase>'
        '<testcase classname="a" name="d"><failure message="assert 1 == 2"/></testcase></testsuite></testsuites>'
    )
    report = PartialReport(tmp_path / "checks.json", "checks", torch.device("cpu"), {})
    assert parts.count_outcomes(tmp_path / "r.xml", report) == {"passed": 1, "failed": 1, "skipped": 1}
    assert report.failures == [{"what": "a::d", "reason": "assert 1 == 2"}]


def test_tests_without_time_are_skipped(tmp_path, replace_children):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    replace_children(run)
    parts.run_tests(Run(tmp_path, torch.device("cpu"), TimeBox(10.0)))
    assert read(tmp_path, "gpu_checks")["failures"] == [{"what": "tests", "reason": "skipped: time"}]


def test_the_tests_that_are_run_are_there():
    root = Path(__file__).resolve().parents[3]
    assert all((root / path).is_file() for path in parts.TESTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_whole_run_wants_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="no CUDA device"):
        command.run_on_gpu(out=tmp_path)
    with pytest.raises(ValueError, match="`part` has to be one of"):
        command.run_on_gpu(out=tmp_path, part="nonsense")
