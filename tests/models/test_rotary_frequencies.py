"""Frequencies from configs alone: those that models of Transformers make of them."""

import pytest
import torch
from transformers import DynamicCache, GPT2Config, LlamaConfig, PhiConfig
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4v.modeling_glm4v import Glm4vTextConfig, Glm4vTextModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextConfig, Qwen2VLTextModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextModel

from kvcache_plugins.eval.tiny_models import build_family
from kvcache_plugins.formats.rotary import RotaryEmbedding
from kvcache_plugins.models.rotary_frequencies import rotary_embedding


SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 6, "vocab_size": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
# Parameters by type, and a rotation of some channels alone
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
# The layout of families, by the form of their embedding; some layers of the last ones have none
FAMILIES = {
    **dict.fromkeys(["falcon", "gemma3_text", "llama", "mixtral", "qwen3"], ("half-split", 1)),
    # The first channels alone
    **dict.fromkeys(["fuyu", "glm4_moe", "nemotron", "persimmon", "phi"], ("half-split", 2)),
    **dict.fromkeys(["gpt_neox", "stablelm"], ("half-split", 4)),
    **dict.fromkeys(["cohere", "ernie4_5", "helium"], ("interleaved", 1)),
    **dict.fromkeys(["codegen", "glm", "glm4", "gptj"], ("interleaved", 2)),
    # The other way
    "nanochat": ("half-split", 1),
    "smollm3": ("half-split", 1),
    **dict.fromkeys(["cohere2", "llama4_text"], ("interleaved", 1)),
}
SECTIONS = {
    "glm4v": (Glm4vTextModel, Glm4vTextConfig, {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}),
    "qwen2_vl": (Qwen2VLTextModel, Qwen2VLTextConfig, {"mrope_section": [8, 4, 4]}),
    "qwen3_vl": (Qwen3VLTextModel, Qwen3VLTextConfig, {"mrope_section": [8, 4, 4], "mrope_interleaved": True}),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_frequencies_equal_the_models(kind):
    make, embedding = (PhiConfig, PhiRotaryEmbedding) if kind == "partial" else (LlamaConfig, LlamaRotaryEmbedding)
    config = make(**SMALL, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **PARAMETERS[kind]})
    expected = embedding(config).inv_freq.tolist()
    assert len(expected) == (8 if kind == "partial" else 16)
    assert rotary_embedding(config, 3).frequencies == pytest.approx(expected, rel=1e-6)


def test_frequencies_of_long_texts_equal_longrope():
    parameters = {"rope_type": "longrope", "rope_theta": 5000.0, **PARAMETERS["longrope"]}
    config = LlamaConfig(**SMALL, max_position_embeddings=1024, rope_parameters=parameters)
    embedding = LlamaRotaryEmbedding(config)
    embedding(torch.zeros(1, 1, 64), torch.tensor([[300]]))
    found = rotary_embedding(config, 0)
    assert found.long_frequencies == pytest.approx(embedding.inv_freq.tolist(), rel=1e-6)
    assert found.long_frequencies != found.frequencies
    for kind in PARAMETERS.keys() - {"longrope", "partial"}:
        config = LlamaConfig(**SMALL, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **PARAMETERS[kind]})
        assert rotary_embedding(config, 0).long_frequencies == ()


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic", "longrope"])
def test_default_device_changes_nothing(kind):
    config = LlamaConfig(**SMALL, rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **PARAMETERS[kind]})
    expected = rotary_embedding(config, 3)
    with torch.device("meta"):
        assert rotary_embedding(config, 3) == expected


def test_each_kind_of_layer_has_its_frequencies():
    config = Gemma3TextConfig(**SMALL, head_dim=32, num_key_value_heads=1)
    model = Gemma3RotaryEmbedding(config)
    for index, layer_type in enumerate(config.layer_types):
        expected = getattr(model, f"{layer_type}_inv_freq").tolist()
        assert rotary_embedding(config, index).frequencies == pytest.approx(expected, rel=1e-6)
    assert rotary_embedding(config, 0) != rotary_embedding(config, 5)


def test_a_model_without_rotary_embedding_has_none():
    assert rotary_embedding(GPT2Config(n_layer=1, n_head=2, n_embd=32), 0) == RotaryEmbedding()


@torch.no_grad()
def find_layouts(model):
    """
    Return the name of each layer's layout, and the share of channels that it rotates. The model reads one token again
    and again, so that its keys are equal but for their rotary embedding.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    model(torch.full((1, 60), 7), past_key_values=cache, use_cache=True)
    found = []
    for index, layer in enumerate(cache.layers):
        # Layers with a window hold the newest tokens
        first = layer.get_seq_length() - layer.keys.shape[2]
        for layout in rotary_embedding(config, index).layouts(layer.keys.shape[3]):
            cosines, sines = layout.angles(torch.arange(first, layer.get_seq_length()))
            unrotated = layout.rotate(layer.keys, cosines, -sines)
            if unrotated.var(dim=2).sum() < 1e-6 * unrotated.square().mean(dim=2).sum():
                found.append((layout.name, 2 * len(layout.frequencies) / layout.head_dim))
                break
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_match_the_embeddings_of_families(family):
    if family not in CONFIG_MAPPING:
        pytest.skip("a family of later releases")
    name, part = FAMILIES[family]
    model = build_family(family)
    found = find_layouts(model)
    assert len(found) == model.config.get_text_config(decoder=True).num_hidden_layers
    assert found[0] == (name, 1 / part)
    assert set(found) <= {(name, 1 / part), ("none", 0.0)}


@pytest.mark.parametrize("family", SECTIONS)
def test_layouts_of_text_in_models_with_sections(family):
    make_model, make_config, parameters = SECTIONS[family]
    config = make_config(
        **{**SMALL, "vocab_size": 97},
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, **parameters},
    )
    assert rotary_embedding(config, 0).has_sections
    name = "interleaved" if family == "glm4v" else "half-split"
    assert set(find_layouts(make_model(config).eval())) == {(name, parameters.get("partial_rotary_factor", 1.0))}
