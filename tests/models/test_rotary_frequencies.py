"""Frequencies from configs alone: those that models of Transformers make of them."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PhiConfig
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from kvcache_plugins.models.rotary_frequencies import rotary_frequencies


SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 6, "vocab_size": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
# By type, and of some channels alone
PARAMETERS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 8.0, **LLAMA3},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.0] * 8 + [1.5] * 8,
        "long_factor": [2.0] * 8 + [6.0] * 8,
        "original_max_position_embeddings": 256,
    },
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_frequencies_are_the_models(kind):
    make, embedding = (PhiConfig, PhiRotaryEmbedding) if kind == "partial" else (LlamaConfig, LlamaRotaryEmbedding)
    config = make(**SMALL, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **PARAMETERS[kind]})
    expected = embedding(config).inv_freq.tolist()
    assert len(expected) == (8 if kind == "partial" else 16)
    assert rotary_frequencies(config, 3) == pytest.approx(expected, rel=1e-6)


def test_frequencies_of_longer_texts_are_those_of_longrope():
    parameters = {"rope_type": "longrope", "rope_theta": 5000.0, **PARAMETERS["longrope"]}
    config = LlamaConfig(**SMALL, max_position_embeddings=1024, rope_parameters=parameters)
    embedding = LlamaRotaryEmbedding(config)
    embedding(torch.zeros(1, 1, 64), torch.tensor([[300]]))
    assert rotary_frequencies(config, 0, is_long=True) == pytest.approx(embedding.inv_freq.tolist(), rel=1e-6)
    assert rotary_frequencies(config, 0, is_long=True) != rotary_frequencies(config, 0)
    for kind in PARAMETERS.keys() - {"longrope", "partial"}:
        config = LlamaConfig(**SMALL, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **PARAMETERS[kind]})
        assert rotary_frequencies(config, 0, is_long=True) is None


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic", "longrope"])
def test_default_device_changes_nothing(kind):
    config = LlamaConfig(**SMALL, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **PARAMETERS[kind]})
    expected = rotary_frequencies(config, 3)
    with torch.device("meta"):
        assert rotary_frequencies(config, 3) == expected


def test_layers_of_another_kind_have_others():
    config = Gemma3TextConfig(**SMALL, head_dim=32, num_key_value_heads=1)
    model = Gemma3RotaryEmbedding(config)
    for index, layer_type in enumerate(config.layer_types):
        expected = getattr(model, f"{layer_type}_inv_freq").tolist()
        assert rotary_frequencies(config, index) == pytest.approx(expected, rel=1e-6)
    assert rotary_frequencies(config, 0) != rotary_frequencies(config, 5)


def test_a_model_without_rotary_embedding_has_none():
    assert rotary_frequencies(GPT2Config(n_layer=1, n_head=2, n_embd=32), 0) is None
