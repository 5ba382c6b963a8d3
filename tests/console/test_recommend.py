"""`kvcache-plugins recommend`: what it prints, as a table and as JSON, and how it exits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from kvcache_plugins import cli, predict_memory


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a config and nothing else."""
    path: Path = tmp_path_factory.mktemp("config-alone")
    tiny_model("llama").config.save_pretrained(path)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["recommend", *arguments])


def run_small(folder: str, memory: str, *arguments: str) -> Result:
    caches = ["--cache", "dynamic", "--cache", "gear-2bit", "--cache", "infinigen"]
    options = ["--model", folder, "--memory", memory, "--context", "1000", "--device", "cuda"]
    return run(*options, *caches, *arguments)


def test_json_holds_what_the_arithmetic_says(folder: str) -> None:
    result = run_small(folder, "400kB", "--new-tokens", "2", "--host-memory", "1GiB", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    for row in content["caches"]:
        report = predict_memory(folder, row["cache"], 1000, new_tokens=2)
        assert (row["total_bytes"], row["kv_percent"]) == (report.total_bytes, report.kv_percent)
        assert row["device_bytes"] == report.devices["cuda"]
        assert sum(row["parts"].values()) == row["total_bytes"]
    assert content["host_memory_bytes"] == 2**30
    assert content["recommended"] == "infinigen"
    # Every field is named where a user looks for it
    documented = run("--help").stdout
    assert all(name in documented for name in [*content, *content["caches"][0]])


def test_table_marks_what_is_recommended(folder: str) -> None:
    result = run_small(folder, "400kB")
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.split()}
    assert " no " in lines["dynamic"]
    assert " take it " in lines["infinigen"]
    assert " yes " in lines["gear-2bit"]
    headings = ["cache", "KL", "fits", "on cuda", "in host", "KV %", "max context", "max batch"]
    assert " ".join(lines["cache"].split()) == " ".join(headings)
    # The title is folded where the folder's name is long
    assert "in 400.00 kB" in " ".join(result.stdout.split())
    assert "`infinigen` is nearest to the dense cache in measured KL of what fits" in result.stdout
    assert "made for" not in result.stdout
    assert "infinigen" in result.stderr
    assert all(
        len(line) <= 80 for line in result.stdout.splitlines() if line.split()[:1] in (["cache"], ["infinigen"])
    )


def test_limits_are_said(folder: str) -> None:
    result = run("--model", folder, "--memory", "64GiB", "--context", "9000", "--cache", "h2o", "--with-weights")
    assert "The model was made for 8,192 tokens: fewer than were asked for." in result.stdout
    assert "beside weights of" in " ".join(result.stdout.split())
    assert ">16,777,216" in result.stdout


def test_nothing_that_fits_exits_with_1(folder: str) -> None:
    result = run_small(folder, "1kB")
    assert result.exit_code == 1
    assert "No cache fits: the smallest, `" in result.stdout
    content = json.loads(run_small(folder, "1kB", "--json").stdout)
    assert content["recommended"] is None
    assert all(row["largest_batch_size"] == 0 for row in content["caches"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "8q"], "`memory` has to be a number of bytes"),
        (["--host-memory", "much"], "`host_memory` has to be a number of bytes"),
        (["--model", "/no/such"], "`model` is `/no/such`, but there is no such folder"),
        (["--context", "0"], "Invalid value for '--context'"),
        (["--cache", "gaer"], "Unknown cache `gaer`. Did you mean `gear`?"),
        (["--dtype", "int4"], "`dtype` must be one of `float32`"),
        (["--device", "gpu"], "`device` has to be one of ['cuda', 'cpu']"),
        (["--new-tokens", "5"], "they have to be fewer than 5 but are 5"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_errors_are_one_line(arguments: list[str], message: str, folder: str) -> None:
    given = {"--memory": "1GB", "--context": "5", "--model": folder, **dict([arguments])}
    result = run(*(word for pair in given.items() for word in pair))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert result.stdout == ""


@pytest.mark.parametrize(("memory", "shown"), [("100MB", "100.00 MB"), ("1.5 GB", "1.50 GB"), ("8GiB", "8.00 GiB")])
def test_sizes_are_in_the_units_of_the_budget(memory: str, shown: str, folder: str) -> None:
    result = run("--model", folder, "--memory", memory, "--context", "1000", "--cache", "dynamic")
    assert f"in {shown}" in " ".join(result.stdout.split())
    in_thousands = "i" not in memory
    assert ("KiB" in result.stdout or "MiB" in result.stdout) != in_thousands


def test_without_a_gpu_sizes_are_of_a_cpu(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("--model", folder, "--memory", "1GB", "--context", "100", "--cache", "dynamic", "--json")
    assert (json.loads(result.stdout)["device"], json.loads(result.stdout)["dtype"]) == ("cpu", "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = run("--model", folder, "--memory", "1GB", "--context", "100", "--cache", "dynamic", "--json")
    assert json.loads(result.stdout)["device"] == "cuda"
