"""Names that are imported when they are asked for."""

import pytest

import kvcache_plugins
from kvcache_plugins import lazy_imports


def test_importing_the_package_imports_nothing_heavy(run_python) -> None:
    code = "import sys, kvcache_plugins as k\nk.__version__, k.list_caches('gear*'), dir(k)\n"
    heavy = "['torch', 'transformers', 'typer', 'rich', 'packaging']"
    code += f"print([each for each in {heavy} if each in sys.modules])"
    assert run_python("-c", code, timeout=600).stdout == "[]\n"


@pytest.mark.parametrize("name", [*kvcache_plugins.__all__, "__version__"])
def test_every_public_name_exists_and_is_listed(name: str) -> None:
    assert getattr(kvcache_plugins, name)
    assert dir(kvcache_plugins) == sorted([*kvcache_plugins.__all__, "__version__"])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvcache_plugins' has no attribute 'GERCache'"):
        _ = kvcache_plugins.GERCache
    with pytest.raises(ImportError, match="GERCache"):
        from kvcache_plugins import GERCache  # noqa: F401


def test_a_name_is_loaded_once() -> None:
    get, _ = lazy_imports.lazy_attributes(__name__, {"digits": "string:digits"})
    assert "digits" not in globals()
    assert get("digits") == "0123456789" == globals()["digits"]
