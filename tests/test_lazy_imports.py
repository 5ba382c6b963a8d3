"""Names that are imported when they are asked for."""

import json
import subprocess
import sys

import pytest

import kvcache_plugins
from kvcache_plugins import lazy_imports


def in_a_new_process(code: str) -> object:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(finished.stdout)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import json, sys, kvcache_plugins as k\nk.__version__, k.list_caches('gear*'), dir(k)\n"
    heavy = "['torch', 'transformers', 'typer', 'rich', 'packaging']"
    assert in_a_new_process(f"{code}print(json.dumps([each for each in {heavy} if each in sys.modules]))") == []


@pytest.mark.parametrize("name", [*kvcache_plugins.__all__, "__version__"])
def test_every_name_is_there_and_listed(name: str) -> None:
    assert getattr(kvcache_plugins, name)
    assert name in dir(kvcache_plugins)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvcache_plugins' has no attribute 'GERCache'"):
        _ = kvcache_plugins.GERCache
    with pytest.raises(ImportError, match="GERCache"):
        from kvcache_plugins import GERCache  # noqa: F401


def test_a_name_is_loaded_once() -> None:
    get, names = lazy_imports.lazy_attributes(__name__, {"digits": "string:digits"})
    assert "digits" in names() and "digits" not in globals()
    assert get("digits") == "0123456789" == globals()["digits"]
