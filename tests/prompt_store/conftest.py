"""Comparison of caches for the tests of the store."""

from collections.abc import Callable

import pytest
import torch

from kvcache_plugins import GEARCache
from kvcache_plugins.files.schema import pack
from kvcache_plugins.packed.snapshot import state_of


def _assert_same(found: GEARCache, expected: GEARCache) -> None:
    for index, (one, other) in enumerate(zip(found.layers, expected.layers, strict=True)):
        (document, tensors), (wanted, wanted_tensors) = pack(state_of(one, index)), pack(state_of(other, index))
        for counted in (document, wanted):
            calls = counted.pop("counters", {})
            counted["counters"] = {name: calls.get(name) for name in ("tokens_compressed", "chunks_compressed")}
        assert document == wanted
        assert tensors.keys() == wanted_tensors.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == wanted_tensors[name].dtype and torch.equal(tensor, wanted_tensors[name]), name


@pytest.fixture(scope="session")
def assert_same() -> Callable[[GEARCache, GEARCache], None]:
    """Two caches hold the same, in every bit that a file of them would have, but for how often they were asked."""
    return _assert_same


@pytest.fixture(scope="session")
def read_in_blocks() -> Callable[..., GEARCache]:
    """A cache that was fed a prompt in blocks, without a store."""

    def read(model, input_ids, cache, length=256):
        with torch.no_grad():
            for start in range(0, input_ids.shape[1], length):
                model(input_ids[:, start : start + length], past_key_values=cache)
        return cache

    return read
