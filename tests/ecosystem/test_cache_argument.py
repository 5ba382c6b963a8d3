"""Caches handed over by the name that Transformers has for them since 5.24, `cache`, and by the older one."""

import inspect

import pytest
import torch
from transformers import Cache, PreTrainedModel

from kvcache_plugins import create_cache
from kvcache_plugins.models.cache_argument import CACHE_NAMES, as_argument, find_cache


PROMPT, NEW = 150, 6


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("cache_name", ["transform", "infinigen", "h2o"])
def test_both_argument_names_fill_the_cache(tiny_llama: PreTrainedModel, cache_name: str, name: str) -> None:
    model = tiny_llama
    if name not in ("past_key_values", *inspect.signature(model.forward).parameters):
        pytest.skip("this release of Transformers has the older name alone")
    prompt = torch.randint(1, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    cache = create_cache(cache_name, model)
    generated = model.generate(prompt, **{name: cache}, **options)
    assert generated.past_key_values is cache
    assert cache.get_seq_length() == PROMPT + NEW - 1
    again = create_cache(cache_name, model)
    with torch.no_grad():
        model(prompt, **as_argument(again))
    assert again.get_seq_length() == PROMPT
    expected = model.generate(prompt, **as_argument(create_cache(cache_name, model)), **options)
    torch.testing.assert_close(generated.sequences, expected.sequences)


def test_cache_is_passed_by_the_name_in_the_signature(tiny_llama: PreTrainedModel) -> None:
    cache = Cache(layers=[])

    def older(input_ids: torch.Tensor, past_key_values: Cache | None = None) -> None:
        """A forward of a model's own repository, written for an older release."""

    assert as_argument(cache, older) == {"past_key_values": cache}
    (name,) = as_argument(cache, tiny_llama.forward)
    assert name in inspect.signature(tiny_llama.forward).parameters
    assert find_cache({"use_cache": True, name: cache}) is cache
    assert find_cache({"cache": None, "past_key_values": cache}) is cache
    assert find_cache({"use_cache": True}) is None
