"""The processes of these tests import `rank_programs`, so it has to be found by its name."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def saved_model(tiny_model, tmp_path_factory):
    """A factory of folders that tiny models are saved in."""

    def save(architecture: str, **fields: object) -> str:
        folder = tmp_path_factory.mktemp(architecture)
        tiny_model(architecture, **fields).save_pretrained(folder)
        return str(folder)

    return save
