"""How long files and functions may be, and how deep classes of cache layers, read from the source with `ast`."""

import ast
from collections.abc import Iterator
from pathlib import Path


PROJECT_ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "triton_kernels", "eval", "tests", "docs", "notebooks")
MAX_FILE_LINES = 830
MAX_FUNCTION_LINES = 120
# Of functions that `triton.jit` compiles
MAX_KERNEL_LINES = 200


def read_sources() -> dict[str, str]:
    """Every Python file of the project by its path."""
    paths = [path for folder in FOLDERS for path in sorted((PROJECT_ROOT / folder).rglob("*.py"))]
    return {path.relative_to(PROJECT_ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def find_long_files(sources: dict[str, str]) -> Iterator[str]:
    """The files of more lines than the style allows."""
    for path, source in sources.items():
        length = len(source.splitlines())
        if length > MAX_FILE_LINES:
            yield f"{path} has {length} lines"


def find_long_functions(sources: dict[str, str]) -> Iterator[str]:
    """The functions of more lines than the style allows, docstring and all."""
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if length > (MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES):
                    yield f"{path}: {node.name} has {length} lines"


def test_files_are_no_longer_than_allowed() -> None:
    assert list(find_long_files(read_sources())) == []


def test_functions_are_no_longer_than_allowed() -> None:
    assert list(find_long_functions(read_sources())) == []
