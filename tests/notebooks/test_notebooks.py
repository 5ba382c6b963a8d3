"""Every notebook runs in a fresh kernel, wherever it lies, and is committed with what it put out, whole and clean."""

import ast
import importlib
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

import nbformat
from nbclient.exceptions import CellExecutionError

from kvcache_plugins.contract import run_contract, tiny_models
from kvcache_plugins.models.reference_model import reference_models


NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = ["gear", "infinigen", "kv_runahead", "quickstart", "your_own_cache"]
# Tests of guides and caches run the code of the other notebooks too
RUN_ALWAYS = ("quickstart",)
# Paths of a machine, and what an execution at a certain time leaves in the metadata
OF_A_MACHINE = re.compile(r"/(?:tmp|root|home|Users|work|mnt|opt)/|[A-Z]:\\\\|iopub\.|shell\.execute_reply")
DISPLAYING = {"print", "display", "show", "Markdown"}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of_output(cell: nbformat.NotebookNode) -> set[str]:
    """`stdout` and the forms of a cell's results; a notebook shows the richest form."""
    return {kind for output in cell.outputs for kind in (output.get("data") or {output.get("name", "error"): None})}


def displays(source: str) -> bool:
    """Tells whether a cell shows something: it ends with a value, or calls what prints or draws, in a loop or not."""
    tree = ast.parse(source)
    last = tree.body[-1]
    is_shown = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)
    outside = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    calls = [node.func for top in outside for node in ast.walk(top) if isinstance(node, ast.Call)]
    names = {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in calls}
    return is_shown or bool(names & DISPLAYING)


@pytest.fixture(scope="module")
def executor(load_file) -> ModuleType:
    """`notebooks/execute.py`, which is no part of the package."""
    return load_file(NOTEBOOKS / "execute.py")


def test_all_notebooks_are_tested() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_imports_of_the_package_exist(name: str) -> None:
    imports = [node for cell in code_cells(read(name)) for node in ast.walk(ast.parse(cell.source))]
    own = [node for node in imports if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcache_")]
    assert own
    for node in own:
        module = importlib.import_module(node.module or "")
        assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in RUN_ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_runs_and_shows_the_committed_output(name: str, executor: ModuleType, tmp_path: Path) -> None:
    if not reference_models()["smollm2"]:
        assert os.environ.get("CI") != "true", "the package that carries `smollm2` is not installed"
        pytest.skip("the package that carries `smollm2` is not installed: run `make test`")
    committed, executed = read(name), read(name)
    # Far from the repository: nothing may depend on where a notebook is started
    assert "Warning" not in executor.execute(executed, tmp_path)
    assert not list(tmp_path.iterdir())
    assert [kinds_of_output(cell) for cell in code_cells(executed)] == [
        kinds_of_output(cell) for cell in code_cells(committed)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_committed_with_all_outputs(name: str) -> None:
    cells = code_cells(read(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert [bool(cell.outputs) for cell in cells] == [displays(cell.source) for cell in cells]
    drawn = ["image/png" in kinds_of_output(cell) for cell in cells]
    assert drawn == ["plt.show()" in cell.source for cell in cells]
    assert sum(drawn) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_notebook_names_no_machine(name: str) -> None:
    notebook = read(name)
    for cell in code_cells(notebook):
        assert cell.metadata == {}
        for output in cell.outputs:
            # Base64, in which any letters may stand
            output.get("data", {}).pop("image/png", None)
    assert OF_A_MACHINE.findall(nbformat.writes(notebook)) == []
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_explain_every_cell(name: str) -> None:
    cells = read(name).cells
    assert cells[0].source.startswith("# ")
    assert "## What to take from it" in cells[-1].source
    for before, cell in zip(cells, cells[1:], strict=False):
        # Words before code; a picture may follow the numbers that it shows
        if cell.cell_type == "code" and before.cell_type == "code":
            assert "plt.show()" in cell.source or "print(" in cell.source
    words = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert "load_model" in words
    assert not re.search(r"\b\d+(\.\d+)? (seconds|minutes|ms)\b", words)


def test_layer_of_a_cache_of_your_own_keeps_the_contract() -> None:
    cell = ast.parse(code_cells(read("your_own_cache"))[0].source)
    # The rest of the notebook needs lm-eval, which takes long to import
    cell.body = [node for node in cell.body if "lm_eval" not in ast.unparse(node)]
    namespace: dict[str, Any] = {"__name__": "your_own_cache"}
    exec(compile(cell, "your_own_cache", "exec"), namespace)
    tiny = tiny_models()["llama"]
    results = run_contract(tiny, lambda: namespace["Int8Cache"](tiny.config))
    assert [result.name for result in results if result.status != "pass"] == ["save-load"]


def test_an_error_fails(executor: ModuleType, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1)\n1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        executor.execute(notebook, tmp_path)


def test_stderr_and_times_are_left_out(executor: ModuleType, tmp_path: Path) -> None:
    source = "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nprint(os.getcwd())"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    assert executor.execute(notebook, tmp_path) == "err\n"
    (cell,) = notebook.cells
    assert "".join(output.text for output in cell.outputs) == f"out\n{tmp_path.resolve()}\n"
    assert cell.metadata == {}
