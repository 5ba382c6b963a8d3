"""Ways to call `generate` beyond those of the contract, what a mistake in the call leads to, and gradients: exact
through a first prompt, refused through what is stored, and no cache at all under checkpointing. `torch.compile`d
models generate the same tokens; caches stay out of the graphs.
"""

import functools
import warnings

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from kvcache_plugins import TransformCodingCache, create_cache
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import unwrap_model


def test_inputs_embeds_generate_the_same_tokens(cache_name, tiny_llama, make_cache, prompt, generate):
    expected = generate(tiny_llama, prompt(), make_cache(cache_name, tiny_llama))
    embeds = tiny_llama.get_input_embeddings()(prompt())
    cache = make_cache(cache_name, tiny_llama)
    tokens = tiny_llama.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected)


def test_assistant_has_its_own_cache(cache_name, tiny_model, make_cache, prompt, generate):
    model, assistant = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1 + (cache_name == "infinigen"))
    with torch.no_grad():
        assistant.lm_head.weight += 0.02 * torch.randn(assistant.lm_head.weight.shape)
    expected = generate(model, prompt(15))
    own = make_cache(cache_name, assistant)
    # `generate` has no argument for it
    assistant.generate = functools.partial(assistant.generate, **as_argument(own))
    tokens = generate(model, prompt(15), assistant_model=assistant)
    assert torch.equal(tokens, expected)
    assert own.get_seq_length() > 15


@pytest.fixture(scope="module")
def gemma4():
    """A random Gemma 4 and its assistant, which attends to the states of two of the model's layers."""

    def text_config(num_layers, num_shared):
        return transformers.Gemma4TextConfig(
            **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": num_layers},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
            **{"layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2), "sliding_window": 32},
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False},
            **{"num_kv_shared_layers": num_shared, "enable_moe_block": False, "initializer_range": 0.1},
            **{"eos_token_id": None, "pad_token_id": 0},
        )

    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(text_config(4, 0)).eval()
    config = transformers.Gemma4AssistantConfig(text_config=text_config(2, 2), backbone_hidden_size=64)
    assistant = transformers.Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 4
    return model, assistant


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("name", ["transform", "gear-4bit", "kvarn-k4v4", "llamacpp-q8_0", "infinigen", "h2o"])
def test_an_assistant_reads_states_without_rejected_tokens(name, gemma4, prompt, generate):
    """Gemma's assistant gets states after rejected tokens were removed from the cache."""
    model, assistant = gemma4
    exact = {
        "infinigen": {"alpha": float("inf"), "max_fetch_ratio": 1.0},
        "h2o": {"heavy_ratio": 0.5, "recent_ratio": 0.5},
    }
    caches = [create_cache(name, model, **exact.get(name, {})) for _ in range(2)]
    options = {"max_new_tokens": 20}
    expected = generate(model, prompt(200), None if name in exact else caches[0], **options)
    assert torch.equal(generate(model, prompt(200), caches[1], assistant_model=assistant, **options), expected)


def test_an_assistant_is_refused_states_with_evicted_tokens(gemma4, prompt, generate):
    model, assistant = gemma4
    with pytest.raises(ValueError, match="dropped tokens, .*an assistant.*`heavy_ratio` and `recent_ratio`"):
        generate(model, prompt(200), create_cache("h2o", model), assistant_model=assistant, max_new_tokens=20)


def test_another_batch_is_refused_without_losing_tokens(cache_name, tiny_llama, make_cache, prompt):
    cache, untouched = (make_cache(cache_name, tiny_llama) for _ in range(2))
    with torch.no_grad():
        for each in (cache, untouched):
            tiny_llama(prompt(), past_key_values=each)
        with pytest.raises(ValueError, match="`past_key_values` holds 1 sequences of 100 tokens, but got states of 2"):
            tiny_llama(prompt(5, num_rows=2), past_key_values=cache)
        # A single token, for which a cache may have selected tokens ahead, and several tokens
        for more in (prompt(1, seed=1), prompt(3, seed=2)):
            logits, expected = (tiny_llama(more, past_key_values=each).logits for each in (cache, untouched))
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["dynamic", "gear-2bit", "infinigen", "h2o"])
def test_undetectable_misuse_shows_in_the_length(name, tiny_llama, prompt, generate):
    cache = create_cache(name, tiny_llama)
    generate(tiny_llama, prompt(), cache, use_cache=False, max_new_tokens=3)
    assert cache.get_seq_length() == 100 + 101 + 102
    cache = create_cache(name, tiny_llama)
    generate(tiny_llama, prompt(), cache)
    # 107 tokens are taken for the beginning of this prompt
    generate(tiny_llama, prompt(120, seed=1), cache)
    assert cache.get_seq_length() == 120 + 7


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


def decode(model, input_ids, cache):
    """Logits `[1, 3, vocabulary]` of a prompt's last token and of two single steps, in a loop of one's own."""
    with torch.no_grad():
        logits = [model(input_ids=input_ids, past_key_values=cache).logits[:, -1:]]
        for _ in range(2):
            logits.append(model(input_ids=logits[-1].argmax(dim=-1), past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def test_compiled_layers_give_the_same_logits(fresh_dynamo, tiny_llama, make_cache, prompt):
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["transform", "gear-2bit", "kivi-2bit", "h2o", "infinigen"])
def test_prompts_of_many_lengths_compile_nothing_more(name, fresh_dynamo, tiny_llama, prompt):
    compiled, counts = torch.compile(tiny_llama, backend="eager"), []
    for number in range(50):
        decode(compiled, prompt(20 + 37 * number % 120, seed=number), create_cache(name, tiny_llama))
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[-1] < 30 and set(counts[1:]) == {counts[-1]}


def test_full_graphs_are_refused(fresh_dynamo, tiny_llama, prompt):
    compiled = torch.compile(tiny_llama, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.compiler.disable"):
        decode(compiled, prompt(20), TransformCodingCache())


def test_wrapped_models_are_unwrapped(tiny_llama):
    compiled = torch.compile(tiny_llama, backend="eager")
    assert unwrap_model(torch.nn.Sequential(compiled)) is tiny_llama
    assert len(create_cache("h2o", compiled).layers) == 2
    with pytest.raises(ValueError, match="`model` must be a `PreTrainedModel` or a module that holds one"):
        create_cache("gear-2bit", torch.nn.Linear(2, 2))
