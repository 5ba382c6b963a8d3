"""Accelerate: weights on the CPU or on disk, fetched for every forward; the cache is none the wiser."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoModelForCausalLM


MAP = {
    **{"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"},
    **{"model.rotary_emb": "cpu", "lm_head": "cpu"},
}


def load(model, folder):
    model.save_pretrained(folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model", device_map=MAP, offload_folder=folder).eval()


OFFLOADS = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "dispatch_model": lambda model, folder: dispatch_model(model, MAP, "cpu", offload_dir=folder, force_hooks=True),
    "from_pretrained": load,
}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_weights_generate_the_same_tokens(
    offload, tiny_model, tmp_path, make_cache, prompt, generate, cache_name
):
    plain = tiny_model("llama")
    expected = generate(plain, prompt(), make_cache(cache_name, plain))
    model = OFFLOADS[offload](tiny_model("llama"), tmp_path)
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    cache = make_cache(cache_name, model)
    assert torch.equal(generate(model, prompt(), cache), expected)
    assert cache.stats()["attend_calls"] == 14
    assert set(cache.memory().devices) == {"cpu"}
