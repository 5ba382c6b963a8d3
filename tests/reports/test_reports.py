"""Caches in one line: numbers are those of `memory()`."""

import re

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.registry import describe_caches


@pytest.mark.parametrize("name", ["dynamic", "gear-2bit", "h2o", "infinigen", "infinigen-gear", "fp8"])
def test_a_cache_is_printed_in_one_line(name: str, tiny_llama: PreTrainedModel) -> None:
    if not describe_caches(name)[0].is_available:
        pytest.skip(f"`{name}` needs `{describe_caches(name)[0].requires}`")
    cache = create_cache(name, tiny_llama)
    kind = type(cache).__name__
    assert repr(cache) == f"{kind}(empty)"
    with torch.no_grad():
        tiny_llama(torch.randint(2, 128, (1, 150)), past_key_values=cache)
    memory = cache.memory()
    bits = f"{memory.bits_per_value:.2f}"
    assert repr(cache) == f"{kind}({bits} bits a value, 150 tokens, {memory.total_bytes} bytes)"
    assert re.fullmatch(r"\w+\([^\n]+\)", str(cache))
