"""How deep the cache layers inherit: a reader should need at most two classes open at once."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import kvcache_plugins
from kvcache_plugins.layers.prompt_layer import PromptLayer


# Classes from a child of `CacheLayerMixin` to a leaf
MAX_DEPTH = 3


def depth_of(layer_class: type) -> int:
    """
    How many classes stand between a layer and `CacheLayerMixin`, itself among them, along the longest line; those that
    Transformers itself has are not counted.
    """
    if not issubclass(layer_class, CacheLayerMixin):
        return 0
    is_own = layer_class.__module__.partition(".")[0] != "transformers"
    return is_own + max(depth_of(base) for base in layer_class.__bases__)


def own_layers() -> Iterator[type]:
    """Every layer that a module of the package defines."""
    for module in pkgutil.walk_packages(kvcache_plugins.__path__, "kvcache_plugins."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, CacheLayerMixin) and value.__module__ == module.name:
                yield value


def too_deep(layers: Iterator[type] | list[type]) -> list[str]:
    return [f"{layer.__name__}: {depth_of(layer)}" for layer in layers if depth_of(layer) > MAX_DEPTH]


def test_no_layer_is_too_deep() -> None:
    layers = list(own_layers())
    assert {"LazyLayer", "CompressedLayer", "InfiniGenLayer", "H2OLayer", "RunaheadLayer"} <= {
        layer.__name__ for layer in layers
    }
    assert too_deep(layers) == []


@pytest.mark.parametrize(("base", "expected"), [(PromptLayer, ["Below: 4", "Further: 5"]), (DynamicLayer, [])])
def test_a_planted_layer_is_found(base: type, expected: list[str]) -> None:
    class Leaf(base):
        pass

    class Below(Leaf):
        pass

    class Further(type("Mixin", (), {}), Below):
        pass

    assert depth_of(Further) == depth_of(base) + 3
    assert too_deep([Leaf, Below, Further]) == expected
