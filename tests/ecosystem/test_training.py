"""Gradients: exact through a first prompt, refused through what is stored, and no cache at all under checkpointing."""

import warnings

import pytest
import torch


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return model.model.layers[0].self_attn.k_proj.weight.grad.clone()


def test_loss_and_gradients_of_a_prompt_are_exact(cache_name, tiny_llama, make_cache, prompt):
    tiny_llama.train()
    tokens = prompt()
    cache = make_cache(cache_name, tiny_llama)
    loss = tiny_llama(tokens, labels=tokens, past_key_values=cache).loss
    expected = tiny_llama(tokens, labels=tokens).loss
    assert torch.allclose(loss, expected)
    assert torch.allclose(gradient(tiny_llama, loss), gradient(tiny_llama, expected), rtol=1e-3, atol=1e-5)
    assert cache.get_seq_length() == tokens.shape[1]
    # Nothing that is stored holds on to the graph
    assert not any(tensor.requires_grad for layer in cache.layers for _, tensor in layer.named_tensors())


@pytest.mark.parametrize("num_new", [1, 4])
# H2O refuses `eager`
@pytest.mark.parametrize(
    ("cache_name", "attention"),
    [("gear-2bit", "sdpa"), ("gear-2bit", "eager"), ("infinigen", "sdpa"), ("infinigen", "eager"), ("h2o", "sdpa")],
    indirect=["cache_name"],
)
@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
def test_gradients_of_later_tokens_are_refused(attention, num_new, cache_name, tiny_model, make_cache, prompt):
    model = tiny_model("llama", attn_implementation=attention)
    caches = [make_cache(cache_name, model) for _ in range(2)]
    more = prompt(num_new, seed=1)
    with torch.no_grad():
        model(prompt(), past_key_values=caches[0])
        expected = model(more, past_key_values=caches[0]).logits
    model(prompt(), past_key_values=caches[1])
    logits = model(more, past_key_values=caches[1]).logits
    # Recording changes nothing of the forward
    assert torch.allclose(logits, expected, atol=1e-4)
    with pytest.raises(NotImplementedError, match="gradients do not flow through what a cache has stored"):
        logits.sum().backward()


def test_checkpointing_leaves_the_cache_out(cache_name, tiny_llama, make_cache, prompt):
    tokens = prompt()
    expected = gradient(tiny_llama, tiny_llama(tokens, labels=tokens).loss)
    with warnings.catch_warnings():
        # Named otherwise in later releases of Transformers
        warnings.simplefilter("ignore", FutureWarning)
        tiny_llama.gradient_checkpointing_enable()
    cache = make_cache(cache_name, tiny_llama)
    loss = tiny_llama.train()(tokens, labels=tokens, past_key_values=cache).loss
    assert torch.allclose(gradient(tiny_llama, loss), expected, rtol=1e-3, atol=1e-5)
    assert cache.get_seq_length() == 0
