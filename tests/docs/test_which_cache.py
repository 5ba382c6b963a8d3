"""One recommendation everywhere: the table of the front page is that of the documentation's."""

from pathlib import Path

import pytest

from kvcache_plugins import list_caches


ROOT = Path(__file__).resolve().parents[2]


def which_cache(path: Path) -> list[str]:
    """Lines of the table under `## Which cache`."""
    section = path.read_text(encoding="utf-8").split("## Which cache\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")]


def test_readme_and_documentation_recommend_the_same() -> None:
    table = which_cache(ROOT / "README.md")
    assert len(table) > 4
    assert which_cache(ROOT / "docs" / "index.md") == table


def test_what_is_recommended_is_registered() -> None:
    named = {word.strip(" `,") for line in which_cache(ROOT / "README.md")[2:] for word in line.split("|")[2].split()}
    assert {"gear", "infinigen"} <= named & set(list_caches())


def test_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", ["guides/long_context.md", "guides/larger_batches.md", "guides/several_gpus.md"])
def test_guides_take_the_default(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert '"gear"' in text or "--cache gear\n" in text
    assert "gear-2bit" not in text
