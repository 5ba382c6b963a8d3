"""Every rotary embedding is undone: at the same bits keys lose about as much as with a plain one."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvcache_plugins import TransformCodingCache


LENGTH, HEAD_DIM = 300, 64
PARAMETERS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "short_factor": [1.0] * 32,
        "long_factor": [1.0 + index / 8 for index in range(32)],
        "original_max_position_embeddings": 512,
    },
}
# The frequencies of longer texts
PARAMETERS["longrope-long"] = {**PARAMETERS["longrope"], "original_max_position_embeddings": 128}


def make_model(kind, scale=1.0):
    """Make a model of one layer whose channels of keys have energies of their own before the rotary embedding."""
    rope_type = kind.removesuffix("-long")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, **PARAMETERS[kind]},
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    factors = torch.logspace(-1, 1, HEAD_DIM)[torch.randperm(HEAD_DIM)]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(10 * factors.repeat(2)[:, None])
    return model


@torch.no_grad()
def measure_error(model):
    """Return the share of keys' energy that a cache loses, and the number of layers whose embedding it undoes."""
    ids = torch.randint(3, 300, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    cache, dense = TransformCodingCache(model, nbits=3), DynamicCache(config=model.config)
    for each in (cache, dense):
        model(ids, past_key_values=each)
    keys = dense.layers[0].keys
    lost = cache.layers[0].to_dense("keys") - keys
    return float(lost.square().sum() / keys.square().sum()), cache.stats()["layers_unrotated"]


@pytest.mark.parametrize("kind", sorted(PARAMETERS.keys() - {"default"}))
def test_error_is_about_that_of_the_plain_embedding(kind):
    plain, _ = measure_error(make_model("default"))
    error, layers = measure_error(make_model(kind))
    assert error < 1.1 * plain
    assert layers == 1


def test_a_wrong_embedding_is_not_used(monkeypatch):
    """Frequencies that are not the model's: keys are coded as they are, and the counters say so."""
    model = make_model("default")
    with monkeypatch.context() as patch:
        wrong = tuple(torch.linspace(0.5, 3, 32).tolist())
        patch.setattr("kvcache_plugins.transform_coding.cache.rotary_frequencies", lambda *_, is_long=False: wrong)
        _, layers = measure_error(model)
    assert layers == 0
