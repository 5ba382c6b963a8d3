"""Every attention implementation of Transformers' table gives the tokens of `sdpa`, or one line of why not."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_plugins import TransformCodingCache, create_cache, list_caches


DAILY = ("transform", "gear-4bit", "h2o", "infinigen", "turboquant-4bit")
# Transformers' own hand dense states to whatever attention there is
NOT_OURS = {"dynamic", "offloaded", "fp8", "quanto-2bit", "quanto-4bit", "hqq-2bit", "hqq-4bit"}
FLASH = [name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("flash_attention")]
CASES = [
    *((name, implementation) for name in DAILY for implementation in ("eager", "flex_attention", FLASH[0])),
    # All kinds of flash attention are asked the same
    *((DAILY[0], implementation) for implementation in FLASH[1:]),
    # Transform coding weighs a prompt's errors by its queries, which `eager` does not show: its codes are others
    *(
        pytest.param(name, implementation, marks=pytest.mark.long)
        for name in list_caches()
        if name not in NOT_OURS and name != DAILY[0]
        for implementation in (FLASH[1:] if name in DAILY else ("flex_attention", *FLASH))
    ),
]
# Beyond the tokens that caches keep exact
PADDING = 30
SMALL = {
    **{"vocab_size": 128, "initializer_range": 0.1, "hidden_size": 64, "intermediate_size": 64, "pad_token_id": 0},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "sliding_window": 32,
}


@pytest.fixture(autouse=True)
def uncompiled_masks(request, monkeypatch):
    """Block masks made without the C++ compiler, which does not change what they hide."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(
            "transformers.masking_utils.create_block_mask", lambda _compile, **options: create_block_mask(**options)
        )


def use(model, implementation):
    """Set an attention without the packages that `set_attn_implementation` would require; lazy states need none."""
    model.config._attn_implementation_internal = implementation


def padded(tokens):
    mask = torch.ones_like(tokens)
    mask[-1, :PADDING] = 0
    return mask


def feed(model, cache, tokens, sizes):
    """Logits of a prompt's last token and of updates of some sizes, each with the tokens that follow."""
    logits, mask, start = [], padded(tokens), 0
    for size in sizes:
        stop = start + size
        with torch.no_grad():
            output = model(input_ids=tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        logits.append(output.logits if start else output.logits[:, -1:])
        start = stop
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_generated_tokens_equal_those_under_sdpa(tiny_llama, prompt, generate, name, implementation):
    tokens, caches, outputs = prompt(num_rows=2), [], []
    for each in ("sdpa", implementation):
        use(tiny_llama, each)
        # Its first layers are otherwise Transformers' own
        options = {"full_layers": ()} if name.startswith("infinigen") else {}
        caches.append(create_cache(name, tiny_llama, **options))
        outputs.append(generate(tiny_llama, tokens, caches[-1], attention_mask=padded(tokens)))
    assert torch.equal(*outputs)
    stats = caches[1].stats()
    assert stats.get("dense_reads", 0) == stats.get("prompts_without_mask", 0) == 0
    if implementation != "eager":
        assert all(torch.equal(*pair) for pair in zip(*(layer_padding(cache) for cache in caches), strict=True))


def layer_padding(cache):
    return [layer.padding for layer in cache.layers if getattr(layer, "padding", None) is not None]


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "llama-mqa", "mistral-sliding"])
@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_logits_equal_those_under_sdpa_for_prompts_chunks_and_steps(tiny_model, prompt, architecture, implementation):
    """Beyond the rows of a mask that are made at once, and with windows."""
    model, tokens = tiny_model(architecture), prompt(320, num_rows=2)
    # Shorter windows are left to Transformers' own layers, and so to the implementation itself
    sizes, caches = (300, 1, 1, 12, 1), [TransformCodingCache(model.config, sliding="compressed") for _ in range(2)]
    expected = feed(model, caches[0], tokens, sizes)
    use(model, implementation)
    logits = feed(model, caches[1], tokens, sizes)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-4 * expected.std().item())
    assert caches[1].stats()["dense_reads"] == 0
    assert caches[1].stats()["layers_left"] == 0


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_softcaps_and_sinks_equal_eager_attention(prompt, family, implementation):
    torch.manual_seed(0)
    fields = {**SMALL, **({"attn_logit_softcapping": 5.0} if family == "gemma2" else {"num_local_experts": 4})}
    config = CONFIG_MAPPING[family](**fields, layer_types=["full_attention", "full_attention"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens, caches = prompt(104, num_rows=2), [TransformCodingCache(model.config), TransformCodingCache(model.config)]
    expected = feed(model, caches[0], tokens, (100, 1, 3))
    use(model, implementation)
    logits = feed(model, caches[1], tokens, (100, 1, 3))
    assert torch.allclose(logits, expected, rtol=0, atol=1e-3 * expected.std().item())
    assert caches[1].stats()["dense_reads"] == 0


@pytest.mark.parametrize("name", DAILY)
def test_paged_attention_is_refused(tiny_llama, prompt, generate, name):
    tiny_llama.set_attn_implementation("paged|eager")
    with pytest.raises(ValueError, match=r"^`attn_implementation` is `paged\|eager`.*to `sdpa`, `eager` or .*$"):
        generate(tiny_llama, prompt(), create_cache(name, tiny_llama))


@pytest.mark.parametrize(("count_from", "is_dense"), [(0, False), (50, True)], ids=["one sequence", "packed"])
def test_packed_sequences_are_left_to_flash_attention(tiny_llama, prompt, monkeypatch, count_from, is_dense):
    """Leaves packed sequences to the implementation, which gets dense states: here `sdpa` stands for it."""
    seen = []

    def attend(module, query, key, value, attention_mask, **options):
        seen.append(type(key))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS["flash_attention_2"].__closure__[0], "cell_contents", attend)
    positions = torch.arange(100)[None]
    if count_from:
        positions = torch.cat([positions[:, :count_from], positions[:, : 100 - count_from]], dim=1)
    use(tiny_llama, "flash_attention_2")
    tiny_llama(input_ids=prompt(), position_ids=positions, past_key_values=TransformCodingCache(tiny_llama.config))
    assert seen == [torch.Tensor] * (2 if is_dense else 0)


def test_custom_attention_receives_dense_states(tiny_llama, prompt, generate, monkeypatch):
    asks_for = []

    def attend(module, query, key, value, attention_mask, **options):
        if asks_for:
            key.data_ptr()
        return sdpa_attention_forward(module, query, key + 0, value + 0, attention_mask, **options)

    AttentionInterface.register("own", attend)
    try:
        expected = generate(tiny_llama, prompt(), TransformCodingCache())
        tiny_llama.set_attn_implementation("own")
        assert torch.equal(generate(tiny_llama, prompt(), TransformCodingCache(), prefill_chunk_size=100), expected)
        asks_for.append("address")
        with pytest.raises(ValueError, match="address of the keys or values.*`data_ptr`"):
            generate(tiny_llama, prompt(), TransformCodingCache())
    finally:
        del AttentionInterface._global_mapping["own"]
