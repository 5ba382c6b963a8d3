"""Fixtures of the documents' tests: hub names answered without a hub, and the files that examples read."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import resolve_model


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hub_names(tmp_path, monkeypatch, smollm2) -> None:
    """
    The hub's name of SmolLM2 finds the model that was converted from its package: it stands where the hub's library
    keeps what it has downloaded.
    """
    packaged = PACKAGED_MODELS["smollm2"]
    folder = tmp_path / "hub" / f"models--{packaged.hub_name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "snapshots").mkdir()
    (folder / "refs" / "main").write_text("converted", encoding="utf-8")
    (folder / "snapshots" / "converted").symlink_to(resolve_model("smollm2"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def user_folder(tmp_path, monkeypatch, forgets) -> Path:
    """A working directory with the texts that examples read, and a registry that forgets what they register."""
    folder = tmp_path / "work"
    folder.mkdir()
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for name in ("LICENSE", "book.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder
