"""Steps as CUDA graphs on a real GPU: tokens are those without, and a replayed step never has the host wait."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvcache_plugins import create_cache


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PRESETS = ["gear", "gear-t16", "gear-2bit", "kivi-2bit", "gear-k4v3"]


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().cuda()


@pytest.mark.parametrize("padding", [0, 5], ids=["alone", "padded"])
@pytest.mark.parametrize("name", PRESETS)
def test_tokens_are_those_without_graphs(name, padding, llama):
    ids = torch.randint(3, 96, (2 if padding else 1, 131), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 140, "do_sample": False}
    expected = llama.generate(ids, past_key_values=create_cache(name, llama), **options)
    cache = create_cache(name, llama)
    with cache.captured_steps(llama) as steps:
        assert torch.equal(llama.generate(ids, past_key_values=cache, **options), expected)
    assert steps.num_recorded == 1 and steps.num_replayed > 100


@pytest.mark.parametrize("name", PRESETS)
def test_the_host_does_not_wait(name, llama):
    cache = create_cache(name, llama)
    token = llama(torch.full((1, 131), 5, device="cuda"), past_key_values=cache).logits[:, -1:].argmax(dim=-1)
    with cache.captured_steps(llama) as steps:
        llama(token, past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                token = llama(token, past_key_values=cache).logits.argmax(dim=-1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert steps.num_replayed == 9
