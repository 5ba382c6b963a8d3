"""`kvcache-plugins calibrate`: files that caches take, of given texts and of those that the package brings."""

import argparse
import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from kvcache_plugins import cli


PROMPT = "It was the best of times, it was the worst of times. " * 3


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_calibrate_writes_a_file_that_the_cache_takes(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40, encoding="utf-8")
    options = ["--model", tiny_folder, "--text-file", str(tmp_path / "text.txt"), "--windows", "2", "--length", "300"]
    file = tmp_path / "calibration.safetensors"
    result = run("calibrate", *options, "--rank", "8", "--min-recall", "0.01", "--out", str(file))
    assert result.exit_code == 0, result.output
    assert "oracle" in result.stdout
    cache = f"infinigen:calibration={file}"
    result = run("compare", "--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "4", "--cache", cache)
    assert result.exit_code == 0, result.output


def test_calibrate_keeps_what_presets_of_gear_find(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGINS_HOME", str(tmp_path / "home"))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40, encoding="utf-8")
    options = ["--cache", "gear", "--model", tiny_folder, "--text-file", str(text), "--text-file", str(text)]
    result = run("calibrate", *options, "--windows", "1", "--length", "200")
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "home" / "calibrations").iterdir()
    assert file.name in result.stdout.replace("\n", "")
    for cache in ("gear-c16", f"gear-c12:calibration={file}"):
        compared = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "4", "--cache", cache]
        result = run("compare", *compared)
        assert result.exit_code == 0 and "no calibration" not in result.output, result.output
    result = run("calibrate", "--cache", "infinigen", "--text-file", str(text))
    assert result.exit_code == 2 and "`out` has to be given" in result.output


def test_calibrate_needs_no_text_for_gear(tiny_folder: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.safetensors", "again.safetensors")]
    options = ["calibrate", "--cache", "gear", "--model", tiny_folder, "--windows", "4", "--length", "90", "--json"]
    for file in files:
        result = run(*options, "--out", str(file))
        assert result.exit_code == 0, result.output
    assert files[0].read_bytes() == files[1].read_bytes()
    settings = json.loads(result.stdout)["settings"]
    assert (settings["text_file"], settings["windows"], settings["length"]) == (None, 4, 90)
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 8, encoding="utf-8")
    result = run(*options, "--text-file", str(text), "--out", str(tmp_path / "more.safetensors"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "more.safetensors").read_bytes() != files[0].read_bytes()
    compared = ["--model", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "4"]
    result = run("compare", *compared, "--cache", f"gear-c16:calibration={files[0]}")
    assert result.exit_code == 0, result.output


@pytest.mark.long
@pytest.mark.slow
def test_a_calibration_without_a_text_is_worth_having(
    tmp_path: Path, smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    """At the same bits the KL of a text that it was not made of is below that of a prompt's own tables."""
    file, text = tmp_path / "calibration.safetensors", tmp_path / "text.txt"
    result = run("calibrate", "--cache", "gear", "--model", "smollm2", "--out", str(file))
    assert result.exit_code == 0, result.output
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[40_000:], encoding="utf-8")
    options = ["--model", "smollm2", "--text-file", str(text), "--windows", "2", "--prefix", "256", "--scored", "255"]
    caches = ["--cache", "gear-t16", "--cache", f"gear-c16:calibration={file}"]
    result = run("eval", "fidelity", *options, *caches, "--json")
    assert result.exit_code == 0, result.output
    kl = {row["cache"]: row["kl"] for row in json.loads(result.stdout)["rows"]}
    assert kl[f"gear-c16:calibration={file}"] < 0.8 * kl["gear-t16"]
