"""The benchmark beside lm-eval's own model: rows, agreement, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcache_plugins import cli


pytest.importorskip("lm_eval")

ROW = {"question": "cause", "premise": "The glass fell down to the floor.", "choice1": "It was hit.", "choice2": "So."}


def test_rows(saved_with_tokenizer: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_with_tokenizer("llama")
    (tmp_path / "copa").mkdir()
    for file in ("dev.jsonl", "test.jsonl"):
        rows = [{**ROW, "premise": f"{ROW['premise'][:-1]} {number}.", "label": number % 2} for number in range(6)]
        (tmp_path / "copa" / file).write_text("\n".join(json.dumps(row) for row in rows))
    monkeypatch.setenv("KVCACHE_PLUGINS_DATA", str(tmp_path))
    arguments = ["bench", "lm-eval", "--model", folder, "--limit", "3", "--rounds", "1", "--device", "cpu"]
    arguments += ["--cache", "dynamic", "--cache", "gear-2bit", "--mode", "prefix", "--mode", "decode"]
    result = CliRunner().invoke(cli.app, [*arguments, "--task", "kv_copa", "--out", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    rows = {row["model"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert list(rows) == ["hf", "dynamic, prefix", "dynamic, decode", "gear-2bit, prefix", "gear-2bit, decode"]
    for name in ("dynamic, prefix", "dynamic, decode"):
        assert rows[name]["largest_difference"] < 1e-3
        assert rows[name]["same_picks"] == rows[name]["num_items"] == 3
    assert rows["gear-2bit, prefix"]["largest_difference"] > 1e-2
    result = CliRunner().invoke(cli.app, [*arguments, "--task", "kv_gsm8k"])
    assert result.exit_code == 2 and "there is no file" in result.stderr
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join([json.dumps({"question": "?", "answer": "#### 1"})] * 40))
    result = CliRunner().invoke(cli.app, [*arguments, "--task", "kv_gsm8k"])
    assert result.exit_code == 2 and "asks for generate_until" in result.stderr
