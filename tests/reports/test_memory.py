"""What a cache says of itself in one line."""

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


@pytest.mark.parametrize("name", ["dynamic", "gear", "gear-4bit", "h2o", "turboquant-4bit"])
@pytest.mark.filterwarnings("ignore:`config`. all layers of the model attend to a window:UserWarning")
def test_counters_have_the_same_names_where_all_layers_are_windows(name: str, tiny_model) -> None:
    names = []
    for architecture in ("llama", "mistral-sliding"):
        model = tiny_model(architecture)
        cache = create_cache(name, model)
        names.append(list(cache.stats()))
        with torch.no_grad():
            model(torch.randint(2, 128, (1, 150)), past_key_values=cache)
        names.append(list(cache.stats()))
    assert all(each == names[0] for each in names)
