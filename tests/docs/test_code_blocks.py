"""Every block of Python in the README and in `docs/` runs, in order, names shared within a page.

Sybil finds the blocks: of the libraries that do, it is the one that keeps a page's names from block to block and
reports a failure at its line of the page. A block that cannot run here has a comment right above it that says why,
`<!-- not run: needs a GPU -->`, and is compiled.
"""

import re
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator, pad
from sybil.parsers.markdown import CodeBlockParser


ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in path.read_text(encoding="utf-8")
]
REASONS = ("needs a GPU", "needs several processes", "needs a data set")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^\n]*) -->\s*\Z")


def reason_not_to_run(example: Example) -> str | None:
    """Reads the comment right above a block."""
    match = NOT_RUN.search(example.document.text[: example.region.start])
    if match is None:
        return None
    if match["reason"] not in REASONS:
        raise ValueError(f"`not run` has to be one of {list(REASONS)} but got {match['reason']!r} in {example.path}")
    return match["reason"]


def evaluate(example: Example) -> None:
    """Runs a block, or compiles it."""
    if reason_not_to_run(example) is None:
        PythonEvaluator()(example)
    else:
        compile(pad(example.parsed, example.line + example.parsed.line_offset), example.path, "exec")


SYBIL = Sybil(parsers=[CodeBlockParser("python", evaluate)])


def run_page(path: Path) -> int:
    """Runs a page's blocks in order, and returns how many there are."""
    examples = list(SYBIL.parse(path).examples())
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run(page, hub_names, user_folder):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert run_page(ROOT / page) == text.count("```python\n")


def write(tmp_path, *parts):
    path = tmp_path / "page.md"
    path.write_text("\n\n".join(parts), encoding="utf-8")
    return path


def test_blocks_that_fail_or_have_no_reason_are_reported(tmp_path):
    marked = "<!-- not run: needs a GPU -->\n```python\n"
    # What is not run is compiled
    assert run_page(write(tmp_path, f"{marked}undefined_name\n```")) == 1
    for text, error in {
        "```python\nnumber + 1\n```": NameError,
        f"{marked}1 +\n```": SyntaxError,
        "<!-- not run: too long -->\n```python\npass\n```": ValueError,
    }.items():
        with pytest.raises(error):
            run_page(write(tmp_path, text))
