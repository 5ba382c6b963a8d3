"""The documentation builds without a warning, loads nothing from elsewhere, and shows figures of today's results."""

import os
import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from filelock import FileLock


ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
# Files that a browser fetches automatically, without links that a reader follows
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=\"?(?P<src>[^\"\s>]+)|<link\b[^>]*>", re.IGNORECASE
)


@pytest.fixture(scope="module")
def site(tmp_path_factory, run_python) -> Path:
    """The site, built strictly; once, if several processes share the tests."""
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    folder = common / "site"
    with FileLock(common / "site.lock"):
        if not folder.is_dir():
            part = folder.with_suffix(".part")
            run_python("-m", "mkdocs", "build", "--strict", "--site-dir", part, cwd=ROOT, NO_MKDOCS_2_WARNING=1)
            part.rename(folder)
    return folder


def loaded_addresses(html: str) -> list[str]:
    """Lists what a page makes a browser fetch."""
    addresses = []
    for match in LOADED.finditer(html):
        if match["src"]:
            addresses.append(match["src"])
        elif not re.search(r"rel=\"?(?:canonical|next|prev)", match[0]):
            addresses += re.findall(r"href=\"?([^\"\s>]+)", match[0])
    return addresses


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        addresses = loaded_addresses(page.read_text(encoding="utf-8"))
        assert any(address.endswith(".css") for address in addresses), page
        assert not [address for address in addresses if re.match(r"(?:https?:)?//", address)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)[\"' ]*(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_how_tables_were_measured_is_folded_away(site):
    html = (site / "results" / "index.html").read_text(encoding="utf-8")
    folded = re.findall(r"<details[^>]*>\s*<summary>How it was measured</summary>(.*?)</details>", html, re.DOTALL)
    assert any("<code>overview.json</code>" in each for each in folded)
    assert "markdown=" not in html and "overview.json" not in re.sub(
        r"<details.*?</details>", "", html, flags=re.DOTALL
    )


@pytest.mark.parametrize("name", ["GEARCache", "InfiniGenCache", "H2OCache", "runahead_prefill", "create_cache"])
def test_public_names_are_in_the_reference(site, name):
    html = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    assert f'id="kvcache_plugins.{name}"' in html


def test_options_keep_their_shapes_and_shared_texts(site):
    html = (site / "reference" / "caches.html").read_text(encoding="utf-8")
    assert "Of shape <code>[batch_size, prompt length]</code>" in html
    assert html.count("The same for keys or values alone.") == 2


def test_docstrings_are_rewritten(load_file):
    rewrite = load_file(ROOT / "docs" / "extensions" / "hugging_face_docstrings.py").rewrite
    text = """
    Args:
        mask (`torch.Tensor` of shape `[B, (T)]`, *optional*): Padding.
        key_rank, value_rank (`int`, *optional*, defaults to 4):
            The same,
            for one side.

    Returns:
        `torch.Tensor` of shape `[B]`: the lengths.
    """
    expected = """
    Args:
        mask: Of shape `[B, (T)]`. Padding.
        key_rank:
            The same,
            for one side.
        value_rank:
            The same,
            for one side.

    Returns:
        Of shape `[B]`. the lengths.
    """
    assert rewrite(dedent(text)) == dedent(expected)


@pytest.fixture(scope="module")
def draw(load_file):
    return load_file(FIGURES / "draw.py")


def test_all_figures_are_drawn(draw, tmp_path):
    keys = torch.randn(draw.NUM_TOKENS, 64)
    drawn = {path.name for path in draw.draw_all(tmp_path, keys)}
    assert drawn == {path.name for path in FIGURES.glob("*.svg")}
    for name in drawn:
        # Text is drawn as outlines, so that no font is needed
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "<path" in text and "<text" not in text


def test_figures_show_current_results(draw):
    shown = {
        "gear_bytes": "fidelity_wikitext2_smollm2",
        "infinigen_rules": "infinigen_rules_smollm2",
        "runahead_slices": "runahead_smollm2",
        "runahead_times": "runahead_smollm2",
    }
    for name, result in shown.items():
        for theme in ("light", "dark"):
            text = (FIGURES / f"{name}-{theme}.svg").read_text(encoding="utf-8")
            assert draw.source(result) in text, f"{name} shows an older {result}: run `python docs/figures/draw.py`"


def test_pages_show_every_figure_in_both_themes():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    for path in FIGURES.glob("*.svg"):
        mark = "#gh-dark-mode-only" if path.stem.endswith("-dark") else "#gh-light-mode-only"
        assert f"figures/{path.name}{mark}" in pages
