"""That machine code of other sources is never run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba import config, njit

from kvcache_plugins.ops.compiled import machine_code
from kvcache_plugins.ops.compiled.machine_code import kept_beside
from kvcache_plugins.ops.compiled.rows import _attend_task


COMPILED = Path(machine_code.__file__).parent
PROGRAM = """
import sys
from pathlib import Path

# The module alone: the package would import PyTorch
sys.path[:0] = ["{folder}", "{compiled}"]
from machine_code import kept_beside

with kept_beside(Path("{folder}")):
    import outer
print(outer.outer(1), sum(outer.outer.stats.cache_hits.values()))
"""


def run(folder: Path) -> str:
    # Sources that change within a second would be taken for the same
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", PROGRAM.format(folder=folder, compiled=COMPILED)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_a_function_whose_helper_has_changed_is_compiled_anew(tmp_path: Path) -> None:
    inner = "from numba import njit\n\n@njit(cache=True)\ndef inner(x):\n    return x + {}\n"
    (tmp_path / "inner.py").write_text(inner.format(10), encoding="utf-8")
    outer = (
        "from numba import njit\nfrom inner import inner\n\n@njit(cache=True)\ndef outer(x):\n    return inner(x)\n"
    )
    (tmp_path / "outer.py").write_text(outer, encoding="utf-8")
    assert [run(tmp_path), run(tmp_path)] == ["11 0", "11 1"]
    (tmp_path / "inner.py").write_text(inner.format(20), encoding="utf-8")
    assert [run(tmp_path), run(tmp_path)] == ["21 0", "21 1"]
    # Code of sources that are gone is not kept
    assert len(list((tmp_path / "__pycache__").glob("machine-code-*"))) == 1


@pytest.mark.parametrize("function", [_attend_task], ids=["rows"])
def test_every_function_of_the_package_is_kept_there(function) -> None:
    assert "machine-code-" in function.stats.cache_path


def test_the_rest_of_the_process_is_left_alone(tmp_path: Path) -> None:
    before = config.CACHE_DIR
    with kept_beside(tmp_path):
        assert str(tmp_path) in config.CACHE_DIR
    assert before == config.CACHE_DIR

    @njit(cache=True)
    def function(x):
        return x

    assert "machine-code-" not in str(function.stats.cache_path)


def test_a_folder_that_cannot_be_written_is_left_to_numba(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "__pycache__").write_text("a file where a folder should be", encoding="utf-8")
    monkeypatch.setattr(config, "CACHE_DIR", "")
    with kept_beside(tmp_path):
        assert config.CACHE_DIR == ""
