"""Limits of the length of files and functions, read from the source with `ast`."""

import ast
from pathlib import Path


PROJECT_ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "triton_kernels", "eval", "tests", "docs", "notebooks")
MAX_FILE_LINES = 830
# `MAX_KERNEL_LINES` is for functions that `triton.jit` compiles
MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 120, 200


def test_files_and_functions_are_no_longer_than_allowed() -> None:
    paths = [path for folder in FOLDERS for path in sorted((PROJECT_ROOT / folder).rglob("*.py"))]
    too_long = []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if len(source.splitlines()) > MAX_FILE_LINES:
            too_long.append(f"{path}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                # Docstring and all
                if node.end_lineno - node.lineno >= (MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES):
                    too_long.append(f"{path}: {node.name}")
    assert too_long == [] and len(paths) > 300
