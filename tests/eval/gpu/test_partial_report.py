"""A report is whole after every change, and an error becomes a line of it."""

import json

import pytest
import torch

from kvcache_plugins.console import results as report_file
from kvcache_plugins.eval.gpu.partial_report import PartialReport


@pytest.fixture
def report(tmp_path):
    return PartialReport(tmp_path / "folder" / "r.json", "kernels", torch.device("cpu"), {"rounds": 3})


def read(report):
    return json.loads(report.path.read_text())


def test_every_change_is_on_disk(report):
    assert read(report)["rows"] == read(report)["failures"] == []
    report.add({"name": "a"})
    assert read(report)["rows"] == [{"name": "a"}]
    report.fail("b", "because")
    assert read(report)["failures"] == [{"what": "b", "reason": "because"}]
    assert {"benchmark", "commit", "date", "device", "versions", "settings"} <= set(read(report))


def test_an_error_is_noted_and_what_follows_goes_on(report):
    with report.attempt("first"):
        raise RuntimeError("no\nkernel")
    with report.attempt("second"):
        report.add({"name": "second"})
    (failure,) = read(report)["failures"]
    assert failure["what"] == "first"
    assert failure["reason"].startswith("RuntimeError: no kernel (test_partial_report.py:")
    assert read(report)["rows"] == [{"name": "second"}]


def test_an_interruption_is_no_failure(report):
    with pytest.raises(KeyboardInterrupt), report.attempt("it"):
        raise KeyboardInterrupt
    assert read(report)["failures"] == []


def test_an_installed_package_is_told_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(report_file, "__file__", str(tmp_path / "report.py"))
    monkeypatch.delenv("KVCACHE_PLUGINS_COMMIT", raising=False)
    assert report_file.provenance(torch.device("cpu"))["commit"] is None
    monkeypatch.setenv("KVCACHE_PLUGINS_COMMIT", "abc123")
    assert report_file.provenance(torch.device("cpu"))["commit"] == "abc123 (told)"
