"""The script for a GPU runs from end to end, at small sizes and in Triton's interpreter; failures are in its files."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.console import results
from kvcache_plugins.eval import gpu
from kvcache_plugins.eval.benchmark import Result, TimeIsUpError
from kvcache_plugins.eval.commands import run_on_gpu
from kvcache_plugins.eval.gpu import Budget, Run, TimeBox, measure_largest_batch, run_batch
from kvcache_plugins.eval.harness import spread
from kvcache_plugins.eval.kernel_check import MismatchError


# A limit that no machine reaches, however busy it is
FOREVER = float("inf")


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture
def triton_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")


@pytest.fixture
def replace_children(monkeypatch):
    """Return a function that replaces Python processes by a function; other programs (git) run."""
    run = subprocess.run

    def replace(function):
        def replaced(command, **options):
            return function(command, **options) if command[0] == sys.executable else run(command, **options)

        monkeypatch.setattr(subprocess, "run", replaced)

    return replace


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock that limits are measured by: it stands at `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def run_tiny(part: str, folder: Path, name: str) -> dict:
    """Runs a part at small sizes, and reads what it has written under a name."""
    run_on_gpu(out=folder, limit=FOREVER, tiny=True, part=part)
    return read(folder, f"gpu_{name}")


def test_a_wrong_attention_kernel_is_noted_and_not_timed(tmp_path, triton_kernels, monkeypatch):
    """A kernel that is wrong is noted, and not timed; the others are."""
    add = gpu.Contest.add

    def wrong(self, cache_name):
        if cache_name == "gear-l-2bit":
            raise MismatchError("gear-l-2bit is wrong by 1.0e+00: not timed")
        add(self, cache_name)

    monkeypatch.setattr(gpu.Contest, "add", wrong)
    content = run_tiny("attention", tmp_path, "attention_large")
    (failure,) = content["failures"]
    assert "gear-l-2bit is wrong" in failure["reason"]
    assert content["settings"]["kernel"] == "triton"
    rows = {row["name"]: row for row in content["rows"]}
    assert {"dense bfloat16", "gear-2bit", "transform", "copy"} <= set(rows) and "gear-l-2bit" not in rows
    assert 0 < rows["gear-2bit"]["relative_error"] < 5e-3


def test_steps_are_timed_and_unknown_caches_noted(tmp_path, triton_kernels):
    content = run_tiny("step", tmp_path, "step")
    assert [row["cache"] for row in content["rows"]] == ["dynamic", "transform", "gear-2bit", "static"]
    assert [failure["what"] for failure in content["failures"]] == ["no-such-cache"]
    for stats in (row["stats"] for row in content["rows"][1:3]):
        assert stats["kernel_fallbacks"] == stats["dense_reads"] == 0 < stats["fused_calls"]
    assert all(row["tokens_per_s"] > 0 and row["prefill_s"] > 0 for row in content["rows"])


def test_captured_steps_are_near_dense_and_reserve_room(tmp_path):
    for content in (run_tiny("captured", tmp_path, "captured_1x128"), read(tmp_path, "gpu_captured_2x100")):
        assert content["failures"] == []
        rows = {row["cache"]: row for row in content["rows"]}
        assert list(rows) == ["dynamic", "transform", "static, captured", "transform, captured"]
        assert rows["static, captured"]["relative_error"] < 1e-2
        # It has room for what is to come
        assert rows["transform, captured"]["bytes"] > rows["transform"]["bytes"]


def test_offloading_rows_count_transferred_bytes(tmp_path):
    content = run_tiny("infinigen", tmp_path, "infinigen_100")
    # Offloading needs a GPU
    assert [failure["what"] for failure in content["failures"]] == ["offloaded"]
    rows = {row["cache"]: row for row in content["rows"]}
    choosing = ["infinigen:max_fetch_ratio=0.1", "infinigen-transform:max_fetch_ratio=0.1"]
    assert list(rows) == ["dynamic", *(name + more for name in choosing for more in ("", ", all resident"))]
    counted, of_codes = (rows[name]["counted"] for name in choosing)
    # Two of four layers are whole; about a tenth of the others is fetched
    assert 0.04 < counted["bytes_per_token"] / counted["full_offloading_bytes_per_token"] < 0.07
    assert of_codes["bytes_per_token"] < counted["bytes_per_token"] / 5
    assert of_codes["full_offloading_bytes_per_token"] == counted["full_offloading_bytes_per_token"]
    assert rows["infinigen:max_fetch_ratio=0.1"]["time_against_resident"] > 0
    assert rows["infinigen:max_fetch_ratio=0.1"]["hidden_share"] == 0.0


@pytest.mark.long
def test_largest_batch_fits_the_budget(tmp_path, triton_kernels):
    content = run_tiny("batch", tmp_path, "largest_batch")
    assert content["failures"] == []
    dynamic, gear = content["rows"]
    assert dynamic["largest_batch"] == 1 < gear["largest_batch"]
    assert gear["peak_bytes"] <= content["settings"]["budget_bytes"]


def test_failing_or_hanging_parts_do_not_end_the_run(tmp_path, replace_children, clock):
    commands = []

    def run(command, *, timeout, env, **options):
        commands.append(command)
        assert timeout > 0
        clock.now += 20
        part = command[command.index("--part") + 1]
        if part == "attention":
            raise subprocess.TimeoutExpired(command, timeout)
        if part == "step":
            raise subprocess.CalledProcessError(-11, command)

    replace_children(run)
    run_on_gpu(out=tmp_path, limit=500.0, tiny=True)
    assert [command[command.index("--part") + 1] for command in commands] == list(gpu.PARTS)
    assert all("--tiny" in command for command in commands)
    content = read(tmp_path, "gpu_run_parts")
    assert [row["part"] for row in content["rows"]] == list(gpu.PARTS)
    # Seconds that a part leaves go to the next one: without the 20 seconds of each there would be 150, 225, 285, ...
    assert [round(row["limit"]) for row in content["rows"]] == [150, 205, 245, 315, 360, 400]
    assert {row["seconds"] for row in content["rows"]} == {20}
    reasons = {failure["what"]: failure["reason"] for failure in content["failures"]}
    assert set(reasons) == {"attention", "step"}
    assert reasons["attention"].startswith("skipped: time")
    assert "SIGSEGV" in reasons["step"]


@pytest.mark.parametrize(
    ("call", "limits"), [("checks", [240]), ("times", [122, 220, 366, 472, 570])], ids=["checks", "times"]
)
def test_each_call_shares_its_seconds_among_its_parts(call, limits, tmp_path, replace_children, clock):
    replace_children(lambda command, **options: None)
    run_on_gpu(out=tmp_path, tiny=True, call=call)
    rows = read(tmp_path, f"gpu_{call}_parts")["rows"]
    assert [row["part"] for row in rows] == list(gpu.CALLS[call][0])
    # Each part here takes no time, and leaves its share to the next
    assert [round(row["limit"]) for row in rows] == limits


def test_both_calls_run_every_part():
    assert sum((parts for parts, _ in gpu.CALLS.values()), ()) == tuple(gpu.PARTS)


def test_tables_of_a_folder_are_written(tmp_path):
    report = Result("step", {"steps": 8}, tmp_path / "gpu_step.json")
    report.add({"context": 4096, "cache": "dynamic", "bytes": 1e6, "speed_against_first": 1.0, **spread([1.0] * 8)})
    Result("run", {}, tmp_path / "gpu_run_parts.json").save()
    gpu.write_tables(tmp_path)
    text = (tmp_path / "gpu_tables.md").read_text()
    assert text.startswith("**step**\n\n| context |") and "| 1000.00 to 1000.00 |" in text and "run_parts" not in text


def test_outcomes_of_tests_are_counted(tmp_path):
    (tmp_path / "r.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><skipped/></testcase>'
        '<testcase classname="a" name="d"><failure message="assert 1 == 2"/></testcase></testsuite></testsuites>'
    )
    report = Result("checks", {}, tmp_path / "checks.json")
    assert gpu.count_outcomes(tmp_path / "r.xml", report) == {"passed": 1, "failed": 1, "skipped": 1}
    assert report.failures == [{"what": "a::d", "reason": "assert 1 == 2"}]


def test_tests_without_time_are_skipped(tmp_path, replace_children):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    replace_children(run)
    gpu.run_tests(Run(tmp_path, torch.device("cpu"), TimeBox(FOREVER)))
    assert read(tmp_path, "gpu_checks")["failures"] == [{"what": "tests", "reason": "skipped: time"}]


def test_listed_tests_exist():
    root = Path(__file__).resolve().parents[2]
    assert all((root / path).is_file() for path in gpu.TESTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without CUDA")
def test_a_whole_run_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="no CUDA device"):
        run_on_gpu(out=tmp_path)
    with pytest.raises(ValueError, match="`part` has to be one of"):
        run_on_gpu(out=tmp_path, part="nonsense")
    with pytest.raises(ValueError, match="`call` has to be one of"):
        run_on_gpu(out=tmp_path, call="nonsense")


# The largest batch is the first that fits of those that are tried

CONTEXT, STEPS = 64, 3


@pytest.mark.parametrize("name", ["dynamic", "gear-4bit"])
def test_a_batch_that_exceeds_the_budget_does_not_fit(name, tiny_llama):
    for num_bytes, outcome in ((10**8, nullcontext()), (10**4, pytest.raises(torch.OutOfMemoryError))):
        budget = Budget(num_bytes, torch.device("cpu"))
        with torch.inference_mode(), budget.enforce(), outcome:
            row = run_batch(tiny_llama, create_cache(name, tiny_llama), 3, CONTEXT, STEPS, budget)
    assert row["largest_batch"] == 3 and row["tokens_per_s"] > 0
    assert 3 * row["bytes_per_sequence"] == row["cache_bytes"] == row["peak_bytes"] <= 10**8


@torch.inference_mode()
def test_compression_makes_room_for_more(tiny_llama):
    # A dense sequence: 2 layers, keys and values, 2 heads of 32 channels in float32
    budget = Budget(2 * 2 * 2 * 2 * 32 * 4 * (CONTEXT + STEPS), torch.device("cpu"))

    def largest(name):
        create = lambda: create_cache(name, tiny_llama)  # noqa: E731
        row = measure_largest_batch(tiny_llama, create, CONTEXT, STEPS, budget, TimeBox(FOREVER))
        assert [fits for _, fits in row["trials"]] == [False] * (len(row["trials"]) - 1) + [True]
        return row["largest_batch"]

    assert largest("dynamic") == 2 < largest("gear-2bit")


# A result is whole after every change, an error becomes a line of it, and time ends what is not begun


@pytest.fixture
def report(tmp_path):
    return Result("kernels", {"rounds": 3}, tmp_path / "folder" / "r.json")


def test_an_error_is_noted_and_later_parts_run(report):
    report.save()
    assert read(report.path.parent, "r")["rows"] == read(report.path.parent, "r")["failures"] == []
    with report.attempt("first"):
        raise RuntimeError("no\nkernel")
    with report.attempt("second"):
        raise TimeIsUpError
    with report.attempt("third"):
        report.add({"name": "third"})
    first, second = read(report.path.parent, "r")["failures"]
    assert first["what"] == "first" and first["reason"].startswith("RuntimeError: no kernel (test_gpu.py:")
    assert second == {"what": "second", "reason": "skipped: time"}
    assert read(report.path.parent, "r")["rows"] == [{"name": "third"}]
    assert {"benchmark", "commit", "date", "device", "versions", "settings"} <= set(read(report.path.parent, "r"))
    with pytest.raises(KeyboardInterrupt), report.attempt("it"):
        raise KeyboardInterrupt
    assert len(read(report.path.parent, "r")["failures"]) == 2


def test_a_step_needs_time_for_half_more_than_the_longest(clock):
    box = TimeBox(17.0)
    with box.step():
        clock.now = 7.0
    assert (box.longest, box.left) == (7.0, 10.0)
    with box.step(1.0):
        pass
    with pytest.raises(TimeIsUpError), box.step():
        pytest.fail("begun")
    with pytest.raises(TimeIsUpError), TimeBox(-1.0).step():
        pytest.fail("begun")


def test_an_installed_package_reports_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "report.py"))
    monkeypatch.delenv("KVCACHE_PLUGINS_COMMIT", raising=False)
    assert results.provenance(torch.device("cpu"))["commit"] is None
    monkeypatch.setenv("KVCACHE_PLUGINS_COMMIT", "abc123")
    assert results.provenance(torch.device("cpu"))["commit"] == "abc123 (told)"
