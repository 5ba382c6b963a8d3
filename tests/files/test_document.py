"""A document gives what was asked for, in type and range, and refuses everything else by the name of the field."""

import pytest

from kvcache_plugins.files.document import Document, parse_json


@pytest.mark.parametrize("value", [None, True, 1.0, "1", -1, 11, [], {}])
def test_integer(value):
    with pytest.raises(ValueError, match=r"`outer\[0\]\.x` has to be an integer from 0 to 10 but got"):
        Document({"outer": [{"x": value}]}).rows("outer")[0].integer("x", 0, 10)


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, [], {}])
def test_number(value):
    with pytest.raises(ValueError, match="`x` has to be a finite number"):
        Document({"x": value}).number("x")
    with pytest.raises(ValueError, match="`x` has to be an object of finite numbers"):
        Document({"x": {"y": value}}).numbers("x")


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("boolean", 1),
        ("text", 1),
        ("rows", {}),
        ("rows", [1]),
        ("inner", []),
        ("integers", [1, -1]),
        ("integers", [True]),
        ("integers", 3),
    ],
)
def test_other_types(method, value):
    with pytest.raises(ValueError, match="`x"):
        getattr(Document({"x": value}), method)("x")


def test_fields_are_taken_once():
    document = Document({"x": 1, "y": None, "z": "a"})
    assert document.integer("x") == 1 and document.is_null("y") and document.choice("z", ["a", "b"]) == "a"
    document.finish()
    with pytest.raises(ValueError, match="`x` is missing"):
        document.integer("x")
    with pytest.raises(ValueError, match="`more` is unknown"):
        Document({"more": 1}).finish()


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, "", b"\xff", "1" * 5000])
def test_text_that_is_no_json(text):
    with pytest.raises(ValueError):
        parse_json(text)
