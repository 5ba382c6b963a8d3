"""The frozen promises: what counts as a loss, and the bytes of one cache of each kind."""

import json

import pytest

from kvcache_plugins.eval.promises import FOLDER, losses, measure_bytes


FROZEN = json.loads((FOLDER / "frozen.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("part", "row", "kept", "lost"),
    [
        ("bytes", {"gear": {"5": 100}}, {"gear": {"5": 99}}, {"gear": {"5": 101}}),
        ("bytes", {"gear": {"5": 100}}, {"gear": {"5": 100}}, {"gear": {"5": "ValueError"}}),
        ("fidelity", {"gear": {"prompt": 0.01}}, {"gear": {"prompt": 0.0104}}, {"gear": {"prompt": 0.0106}}),
        ("fidelity", {"gear": {"prompt": 0.01}}, {"gear": {"prompt": 0.0}}, {"gear": {"prompt": float("nan")}}),
        ("speed", {"64": {"gear": 1.0}}, {"64": {"gear": 0.94}}, {"64": {"gear": 0.93}}),
        ("speed", {"64": {"gear": 1.0}}, {"64": {"gear": 2.0}}, {"64": {}}),
    ],
)
def test_losses(part, row, kept, lost) -> None:
    frozen = {"renamed": {}, part: row}
    assert not list(losses(frozen, {part: kept}))
    assert len(list(losses(frozen, {part: lost}))) == 1
    assert len(list(losses(frozen, {part: {}}))) == 1


def test_a_renamed_cache_is_found() -> None:
    frozen = {"renamed": {"old": "new"}, "bytes": {"old": {"5": 100}}}
    assert not list(losses(frozen, {"bytes": {"new": {"5": 100}}}))


def test_bytes_are_as_frozen() -> None:
    names = ("gear", "gear-4bit", "gear-c16", "gear-t30", "infinigen", "llamacpp-q4_0")
    frozen = {name: FROZEN["bytes"][name] for name in names}
    assert not list(losses({"renamed": {}, "bytes": frozen}, {"bytes": measure_bytes(frozen)}))
