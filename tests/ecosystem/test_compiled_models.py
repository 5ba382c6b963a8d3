"""`torch.compile`d models generate the same tokens; caches stay out of the graphs."""

import pytest
import torch
from torch._dynamo.utils import counters

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.registry import unwrap_model


def decode(model, input_ids, cache):
    """Logits `[1, 3, vocabulary]` of a prompt's last token and of two single steps, in a loop of one's own."""
    with torch.no_grad():
        logits = [model(input_ids=input_ids, past_key_values=cache).logits[:, -1:]]
        for _ in range(2):
            logits.append(model(input_ids=logits[-1].argmax(dim=-1), past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def test_compiled_layers(fresh_dynamo, tiny_llama, make_cache, prompt):
    """Layer by layer, and one model for both caches, as compiling takes long."""
    names = ("infinigen", "gear-2bit")
    expected = {name: decode(tiny_llama, prompt(), make_cache(name, tiny_llama)) for name in names}
    for layer in tiny_llama.model.layers:
        layer.compile(backend="eager")
    for name in names:
        cache = make_cache(name, tiny_llama)
        assert torch.allclose(decode(tiny_llama, prompt(), cache), expected[name], atol=1e-4)
        assert cache.stats()["fused_calls"] == cache.stats()["attend_calls"] == 4
    # Much was compiled, but for what is the caches'; nothing was given up
    assert counters["stats"]["unique_graphs"] >= 2
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


def test_full_graphs_are_refused(fresh_dynamo, tiny_llama, prompt):
    compiled = torch.compile(tiny_llama, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.compiler.disable"):
        decode(compiled, prompt(20), GEARCache())


def test_wrappers_are_seen_through(tiny_llama):
    compiled = torch.compile(tiny_llama, backend="eager")
    assert unwrap_model(torch.nn.Sequential(compiled)) is tiny_llama
    assert len(create_cache("h2o", compiled).layers) == 2
    with pytest.raises(ValueError, match="`model` must be a `PreTrainedModel` or a module that holds one"):
        create_cache("gear-2bit", torch.nn.Linear(2, 2))
