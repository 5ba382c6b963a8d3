"""The frozen promises: rules for a loss, and the bytes of one cache of each kind."""

import json

import pytest

from kvcache_plugins.eval.promises import FOLDER, losses, measure_bytes


FROZEN = json.loads((FOLDER / "frozen.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("part", "row", "kept", "lost"),
    [
        ("bytes", {"transform": {"5": 100}}, {"transform": {"5": 99}}, {"transform": {"5": 101}}),
        ("bytes", {"transform": {"5": 100}}, {"transform": {"5": 100}}, {"transform": {"5": "ValueError"}}),
        (
            "fidelity",
            {"transform": {"prompt": 0.01}},
            {"transform": {"prompt": 0.0104}},
            {"transform": {"prompt": 0.0106}},
        ),
        (
            "fidelity",
            {"transform": {"prompt": 0.01}},
            {"transform": {"prompt": 0.0}},
            {"transform": {"prompt": float("nan")}},
        ),
        ("speed", {"64": {"transform": 1.0}}, {"64": {"transform": 0.94}}, {"64": {"transform": 0.93}}),
        ("speed", {"64": {"transform": 1.0}}, {"64": {"transform": 2.0}}, {"64": {}}),
    ],
)
def test_a_lost_promise_is_reported_once(part, row, kept, lost) -> None:
    frozen = {"renamed": {}, part: row}
    assert not list(losses(frozen, {part: kept}))
    assert len(list(losses(frozen, {part: lost}))) == 1
    assert len(list(losses(frozen, {part: {}}))) == 1


def test_a_renamed_cache_is_found() -> None:
    frozen = {"renamed": {"old": "new"}, "bytes": {"old": {"5": 100}}}
    assert not list(losses(frozen, {"bytes": {"new": {"5": 100}}}))


def test_bytes_do_not_exceed_the_frozen_ones() -> None:
    names = ("transform", "gear-4bit", "calibrated-16", "transform-30", "infinigen", "llamacpp-q4_0")
    frozen = {name: FROZEN["bytes"][name] for name in names}
    assert not list(losses({"renamed": {}, "bytes": frozen}, {"bytes": measure_bytes(frozen)}))
