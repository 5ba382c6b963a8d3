"""The figures of the documentation can be drawn anew from results, and pages show all of them."""

import importlib.util
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw", FIGURES / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_figures_are_drawn(draw, tmp_path):
    keys = torch.randn(draw.NUM_TOKENS, 64)
    drawn = {path.name for path in draw.draw_all(tmp_path, keys)}
    assert drawn == {path.name for path in FIGURES.glob("*.svg")}
    for name in drawn:
        # Text is drawn as outlines, so that no font is needed
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "<path" in text and "<text" not in text


def test_figures_show_the_results_of_today(draw):
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
