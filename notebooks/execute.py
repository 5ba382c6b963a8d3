"""Execute notebooks and save them with their output: `python notebooks/execute.py` executes all of this folder.

Standard error (warnings and progress, which name the machine) is left out, so that two machines write the same output
up to rounding.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


FOLDER = Path(__file__).resolve().parent
# Seconds for one cell
CELL_TIMEOUT = 600


def execute(notebook: nbformat.NotebookNode, working_directory: Path) -> str:
    """
    Execute all cells in a new kernel of this Python, and replace their output. Return the text of standard error,
    which is left out.

    Args:
        notebook (`NotebookNode`): the notebook, changed in place.
        working_directory (`Path`): working directory of the kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(working_directory)}},
    )
    client.execute()
    said = ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            said += "".join(output.text for output in cell.outputs if output.get("name") == "stderr")
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})
    return said


def main(names: list[str]) -> None:
    """Execute some notebooks, or all of this folder."""
    for path in [Path(name) for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        execute(notebook, path.resolve().parent)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
