"""Commands about a folder of prompts, and `generate --store`."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from kvcache_plugins import PromptStore, cli
from kvcache_plugins.prompt_store.store import list_prompts


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def folder(tiny_llama, tmp_path) -> Path:
    """Two prompts that share their first block, and one of another cache."""
    first = torch.randint(3, 128, (1, 520))
    second = torch.cat([first[:, :300], torch.randint(3, 128, (1, 500))], dim=1)
    store = PromptStore(tmp_path)
    store.read(tiny_llama, first)
    store.read(tiny_llama, second)
    store.read(tiny_llama, first, "gear-t22")
    return tmp_path


def test_prompts_are_listed_by_their_ends(folder):
    prompts = list_prompts(folder)
    assert [(each["num_tokens"], each["num_blocks"], each["num_missing"]) for each in prompts] == [
        (512, 2, 0),
        (768, 3, 0),
        (512, 2, 0),
    ]
    assert prompts[0]["options"]["backbone"] == "transform" and len({each["key"] for each in prompts}) == 3
    listed = run("store", "list", "--store", str(folder))
    assert listed.exit_code == 0 and all(each["key"][:12] in listed.stdout for each in prompts)
    content = json.loads(run("store", "list", "--store", str(folder), "--json").stdout)
    assert [each["num_tokens"] for each in content["prompts"]] == [512, 768, 512]


def test_damage_is_named_and_removed(folder):
    path = next(folder.glob("blocks/*/*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    found = run("store", "verify", "--store", str(folder), "--json")
    assert found.exit_code == 1 and list(json.loads(found.stdout)["damaged"]) == [str(path)]
    found = run("store", "verify", "--store", str(folder), "--remove")
    assert found.exit_code == 1 and path.name in found.stdout and "1 damaged files removed" in found.stdout
    assert not path.exists() and run("store", "verify", "--store", str(folder)).exit_code == 0


def test_a_folder_is_cleared(folder, tmp_path):
    assert "6 blocks removed" in run("store", "clear", "--store", str(folder)).stdout
    assert list_prompts(folder) == []
    missing = run("store", "clear", "--store", str(tmp_path / "other"))
    assert missing.exit_code == 2 and "no folder of a prompt store" in missing.stderr
    assert not (tmp_path / "other").exists()


def test_generate_knows_its_prompt_the_second_time(tiny_folder, tmp_path):
    options = ["--model", tiny_folder, "--cache", "gear-t22", "--store", str(tmp_path / "store")]
    options += ["--prompt", "so it goes, " * 50, "--max-new-tokens", "12"]
    first, second = (run("generate", *options) for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.output
    assert first.stdout == second.stdout
    assert "0 of 600 tokens were known" in first.stderr and "512 of 600 tokens were known" in second.stderr
    refused = run("generate", *options[:2], *options[4:], "--max-kl", "0.1")
    assert refused.exit_code == 2 and "`store`" in refused.stderr
