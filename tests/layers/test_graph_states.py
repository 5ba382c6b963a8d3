"""A decode step of a cache as one graph: nothing breaks it, nothing is compiled again, and tokens are the same."""

import copy
import gc

import pytest
import torch
from torch._dynamo.utils import counters

from kvcache_plugins import GEARCache, create_cache


NUM_STEPS = 200


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def prompt(length):
    return torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def decode(model, step, prompt, cache, num_steps):
    """Tokens after a prompt that the model reads by itself."""
    tokens = [model(input_ids=prompt, past_key_values=cache).logits[:, -1:].argmax(dim=-1)]
    for _ in range(num_steps):
        tokens.append(step(input_ids=tokens[-1], past_key_values=cache).logits.argmax(dim=-1))
    return torch.cat(tokens, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gear-2bit", "gear-t22"])
def test_whole_steps_are_compiled_once(name, tiny_llama):
    expected = decode(tiny_llama, tiny_llama, prompt(100), create_cache(name, tiny_llama), NUM_STEPS)
    cache = create_cache(name, tiny_llama)
    cache.compile_whole_steps()
    compiled = torch.compile(tiny_llama, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(decode(tiny_llama, compiled, prompt(100), cache, NUM_STEPS), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert cache.stats()["attend_calls"] == 2 * NUM_STEPS
    assert cache.stats()["dense_reads"] == 0


@pytest.mark.slow
def test_whole_steps_are_compiled_once_where_steps_are_captured(tiny_llama):
    expected = decode(tiny_llama, tiny_llama, prompt(100), create_cache("gear", tiny_llama), NUM_STEPS)
    cache = create_cache("gear", tiny_llama)
    cache.compile_whole_steps()
    with cache.captured_steps(tiny_llama, NUM_STEPS):
        compiled = torch.compile(tiny_llama, backend="eager", fullgraph=True, dynamic=True)
        assert torch.equal(decode(tiny_llama, compiled, prompt(100), cache, NUM_STEPS), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert cache.stats()["dense_reads"] == 0


def test_caches_share_a_graph(tiny_llama):
    compiled = torch.compile(tiny_llama, backend="eager", fullgraph=True, dynamic=True)
    for length in (40, 90):
        cache = GEARCache(tiny_llama.config)
        cache.compile_whole_steps()
        expected = decode(tiny_llama, tiny_llama, prompt(length), GEARCache(tiny_llama.config), 3)
        assert torch.equal(decode(tiny_llama, compiled, prompt(length), cache, 3), expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_copies_are_told_anew(tiny_llama):
    cache = GEARCache(tiny_llama.config)
    cache.compile_whole_steps()
    decode(tiny_llama, tiny_llama, prompt(20), cache, 0)
    copied = copy.deepcopy(cache)
    compiled = torch.compile(tiny_llama, backend="eager", fullgraph=True)
    token = prompt(1)
    with torch.no_grad():
        with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.compiler.disable"):
            compiled(input_ids=token, past_key_values=copied)
        copied.compile_whole_steps()
        compiled(input_ids=token, past_key_values=copied)
    assert (cache.get_seq_length(), copied.get_seq_length()) == (20, 21)


def test_a_cache_that_is_gone_is_named():
    from kvcache_plugins.layers.graph_states import cached_attention

    cache = GEARCache()
    cache.compile_whole_steps()
    number = cache._graph_number
    del cache
    gc.collect()
    states = torch.zeros(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match="compile_whole_steps"):
        cached_attention(states, states, states, None, number, 0, None)


def test_other_attention_is_refused(tiny_model):
    model = tiny_model("llama", attn_implementation="eager")
    cache = GEARCache(model.config)
    cache.compile_whole_steps()
    decode(model, model, prompt(20), cache, 0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="`compile_whole_steps` is for models .* `sdpa`"),
    ):
        compiled(input_ids=prompt(1), past_key_values=cache)
