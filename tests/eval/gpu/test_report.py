"""A report is whole after every change, an error becomes a line of it, and time ends what is not begun."""

import json

import pytest
import torch

from kvcache_plugins.console import results
from kvcache_plugins.eval.gpu.report import PartialReport, TimeBox, TimeIsUpError


@pytest.fixture
def report(tmp_path):
    return PartialReport(tmp_path / "folder" / "r.json", "kernels", torch.device("cpu"), {"rounds": 3})


def read(report):
    return json.loads(report.path.read_text())


def test_an_error_is_noted_and_what_follows_goes_on(report):
    assert read(report)["rows"] == read(report)["failures"] == []
    with report.attempt("first"):
        raise RuntimeError("no\nkernel")
    with report.attempt("second"):
        raise TimeIsUpError
    with report.attempt("third"):
        report.add({"name": "third"})
    first, second = read(report)["failures"]
    assert first["what"] == "first" and first["reason"].startswith("RuntimeError: no kernel (test_report.py:")
    assert second == {"what": "second", "reason": "skipped: time"}
    assert read(report)["rows"] == [{"name": "third"}]
    assert {"benchmark", "commit", "date", "device", "versions", "settings"} <= set(read(report))
    with pytest.raises(KeyboardInterrupt), report.attempt("it"):
        raise KeyboardInterrupt
    assert len(read(report)["failures"]) == 2


def test_a_step_wants_time_for_one_and_a_half_of_the_longest():
    box = TimeBox(10.0)
    box.longest = 7.0
    box.require(1.0)
    with pytest.raises(TimeIsUpError), box.step():
        pytest.fail("begun")
    with pytest.raises(TimeIsUpError), TimeBox(-1.0).step():
        pytest.fail("begun")


def test_an_installed_package_is_told_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "report.py"))
    monkeypatch.delenv("KVCACHE_PLUGINS_COMMIT", raising=False)
    assert results.provenance(torch.device("cpu"))["commit"] is None
    monkeypatch.setenv("KVCACHE_PLUGINS_COMMIT", "abc123")
    assert results.provenance(torch.device("cpu"))["commit"] == "abc123 (told)"
