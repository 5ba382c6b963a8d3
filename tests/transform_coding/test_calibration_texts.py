"""Texts that a calibration is made of where none is given: always the same, of three kinds, and long enough."""

import sys

import pytest

from kvcache_plugins.transform_coding import calibration_texts as module
from kvcache_plugins.transform_coding.calibration_texts import calibration_texts


# Six windows of 512 tokens of each kind, where four characters are a token
LEAST_CHARACTERS = 6 * 512 * 5
WORDS_OF_LANGUAGES = ("the", "wir", "dans", "cuando", "che", "não", "не")


@pytest.fixture(scope="module")
def texts():
    return calibration_texts()


def test_texts_are_reproducible_and_of_three_kinds(texts):
    assert texts == calibration_texts()
    assert list(texts) == ["code", "reference", "prose"]
    assert min(map(len, texts.values())) > LEAST_CHARACTERS


def test_every_kind_of_text_matches_its_name(texts):
    lines = {kind: text.splitlines() for kind, text in texts.items()}
    statements = {kind: sum(line.lstrip().startswith(("def ", "return ")) for line in lines[kind]) for kind in lines}
    assert statements["code"] > 100 and statements["prose"] == 0
    assert statements["reference"] < statements["code"] / 5
    # Heads of definitions, with what they take
    assert sum("(self" in line for line in lines["reference"]) > 50
    assert all(f" {word} " in texts["prose"] for word in WORDS_OF_LANGUAGES)
    assert all(mark in texts["prose"] for mark in ('{"id": ', "Serial: ", "|---", "- ", "1. ", "Dear "))
    assert "每个" in texts["prose"]


@pytest.mark.parametrize("names", ["_CODE", "_REFERENCE"])
def test_missing_modules_are_skipped(names, monkeypatch, texts):
    two = getattr(module, names).split()[:2]
    monkeypatch.setattr(module, names, " ".join(["no/such/module", *two]))
    fewer = calibration_texts()
    kind = names.removeprefix("_").lower()
    assert texts[kind].startswith(fewer[kind]) and 0 < len(fewer[kind]) < len(texts[kind])
    monkeypatch.setattr(module, names, "no/such/module")
    assert set(calibration_texts()) == set(texts) - {kind}


def test_source_files_are_read_without_import(monkeypatch):
    monkeypatch.delitem(sys.modules, "turtle", raising=False)
    calibration_texts()
    assert "turtle" not in sys.modules
