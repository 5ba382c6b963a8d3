"""What a cache says of itself in one line."""

import re

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins import create_cache


@pytest.mark.parametrize("name", ["dynamic", "gear-2bit", "h2o", "infinigen", "infinigen-gear", "fp8"])
def test_a_cache_is_printed_in_one_line(name: str, tiny_llama: PreTrainedModel) -> None:
    cache = create_cache(name, tiny_llama)
    kind = type(cache).__name__
    assert repr(cache) == f"{kind}(empty)"
    with torch.no_grad():
        tiny_llama(torch.randint(2, 128, (1, 150)), past_key_values=cache)
    memory = cache.memory()
    bits = f"{memory.bits_per_value:.2f}"
    assert repr(cache) == f"{kind}({bits} bits a value, 150 tokens, {memory.total_bytes} bytes)"
    assert re.fullmatch(r"\w+\([^\n]+\)", str(cache))
