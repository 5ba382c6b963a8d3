"""Every rotary embedding is undone: at the same bits keys lose about as much as with a plain one."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, DynamicCache

from kvcache_plugins import create_cache
from kvcache_plugins.formats.rotary import NOT_ROTATED, RotaryEmbedding
from kvcache_plugins.models.rotary_frequencies import rotary_embedding


LENGTH, HEAD_DIM, VOCAB_SIZE = 300, 64, 300
# Families of the plain embedding; keys of the second one have a norm
PLAIN, NORMED = "llama", "qwen3"
LONG = {
    "short_factor": [1.0] * 32,
    "long_factor": [1.0 + index / 8 for index in range(32)],
    "original_max_position_embeddings": 512,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
SECTIONS = {"mrope_section": [8, 12, 12]}
# Families, and fields of `rope_parameters` in which they differ from the plain embedding
KINDS = {
    "linear": (PLAIN, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (PLAIN, {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": (PLAIN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    "llama3": (PLAIN, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}),
    "longrope": (PLAIN, {"rope_type": "longrope", **LONG}),
    # The frequencies of longer texts
    "longrope-long": (PLAIN, {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 128}),
    # Some channels alone
    "partial": ("phi", {"partial_rotary_factor": 0.5}),
    "partial-quarter": ("stablelm", {"partial_rotary_factor": 0.25}),
    "interleaved": ("cohere", {}),
    "partial-interleaved": ("glm", {"partial_rotary_factor": 0.5}),
    "without-parameters": ("gptj", {}),
    "reversed": ("nanochat", {}),
    "sections": ("qwen2_vl_text", SECTIONS),
    "sections-interleaved": ("qwen3_vl_text", {**SECTIONS, "mrope_interleaved": True}),
}
NORMED_KINDS = {"reversed", "sections-interleaved"}
# Each form of layout, and each way in which frequencies are found
WRONG = ("yarn", "partial", "interleaved", "partial-interleaved", "without-parameters", "reversed", "sections")


def make_model(family, parameters, auto_class=AutoModel):
    """Make a model of one layer whose channels of keys have energies of their own before the rotary embedding."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 2 * HEAD_DIM, "vocab_size": VOCAB_SIZE}
    sizes |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gptj":
        sizes["rotary_dim"] = HEAD_DIM
    else:
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": HEAD_DIM}
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **parameters}
    torch.manual_seed(0)
    model = auto_class.from_config(CONFIG_MAPPING[family](**sizes)).eval()
    torch.manual_seed(1)
    factors = torch.logspace(-1, 1, HEAD_DIM)[torch.randperm(HEAD_DIM)].repeat(2)
    (projection,) = (module for name, module in model.named_modules() if name.endswith(".k_proj"))
    with torch.no_grad():
        projection.weight.copy_(torch.randn(projection.weight.shape) * factors[:, None])
        if projection.bias is not None:
            projection.bias.zero_()
    return model


@torch.no_grad()
def measure_error(model, positions=None):
    """Return the share of keys' energy that a cache loses, and the number of layers whose embedding it undoes."""
    length = LENGTH if positions is None else positions.shape[-1]
    ids = torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(1))
    cache, dense = create_cache("transform-22", model), DynamicCache(config=model.config)
    for each in (cache, dense):
        model(ids, past_key_values=each, position_ids=positions)
    keys = dense.layers[0].keys
    lost = cache.layers[0].to_dense("keys") - keys
    return float(lost.square().sum() / keys.square().sum()), cache.stats()["layers_unrotated"]


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_layouts_have_the_error_of_the_plain_embedding(kind):
    plain, _ = measure_error(make_model(NORMED if kind in NORMED_KINDS else PLAIN, {}))
    error, layers = measure_error(make_model(*KINDS[kind]))
    assert error < 1.1 * plain
    assert layers == 1


@torch.no_grad()
def measure_kl(model):
    """Return the KL from the dense cache's next tokens, over 16 sequences."""
    generator = torch.Generator().manual_seed(1)
    # Logits of which some are likely
    model.lm_head.weight.normal_(std=0.3, generator=generator)
    ids = torch.randint(3, VOCAB_SIZE, (16, LENGTH + 32), generator=generator)
    logits = []
    for cache in (DynamicCache(config=model.config), create_cache("transform-22", model)):
        model(ids[:, :LENGTH], past_key_values=cache)
        logits.append(model(ids[:, LENGTH:], past_key_values=cache).logits.log_softmax(dim=-1))
    dense, own = logits
    return float(torch.nn.functional.kl_div(own, dense, log_target=True, reduction="sum"))


@pytest.mark.parametrize("kind", [kind for kind, (family, _) in KINDS.items() if family == PLAIN])
def test_kl_is_at_most_that_of_the_plain_embedding(kind):
    plain, other = (make_model(*each, AutoModelForCausalLM) for each in ((PLAIN, {}), KINDS[kind]))
    # Yarn and longrope enlarge scores, and with them the KL of any error: a dense cache with random errors has 1.2
    # times as much
    enlarged = other.model.rotary_emb.attention_scaling**2
    assert measure_kl(other) < 1.1 * enlarged * measure_kl(plain)


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_embedding_is_not_used(kind, monkeypatch):
    """Frequencies of other pairs than in the model: keys are coded as they are, and the counters say so."""
    model = make_model(*KINDS[kind])
    right, _ = measure_error(model)
    wrong = RotaryEmbedding(rotary_embedding(model.config, 0).frequencies[::-1])
    monkeypatch.setattr("kvcache_plugins.transform_coding.cache.rotary_embedding", lambda *_: wrong)
    error, layers = measure_error(model)
    monkeypatch.setattr("kvcache_plugins.transform_coding.cache.rotary_embedding", lambda *_: NOT_ROTATED)
    assert (error, layers) == measure_error(model)
    assert layers == 0
    assert error > 1.3 * right


@pytest.mark.parametrize("kind", ["sections", "sections-interleaved"])
def test_keys_of_images_are_coded_without_the_embedding(kind, monkeypatch):
    """Keys are coded unrotated if most tokens are of an image, although the newest tokens are text."""
    model = make_model(*KINDS[kind])
    rows, columns = torch.arange(32).repeat_interleave(32), torch.arange(32).repeat(32)
    image = 40 + torch.stack([torch.zeros_like(rows), rows, columns])
    text = torch.arange(40), torch.arange(72, 372)
    positions = torch.cat([text[0].expand(3, -1), image, text[1].expand(3, -1)], dim=1)[:, None]
    error, layers = measure_error(model, positions)
    assert layers == 0
    # Text alone is as precise as with the plain embedding, and comparing the newest tokens would not do
    assert measure_error(model, torch.arange(1364).expand(3, 1, -1))[1] == 1
    indexed = replace(rotary_embedding(model.config, 0), has_sections=False)
    monkeypatch.setattr("kvcache_plugins.transform_coding.cache.rotary_embedding", lambda *_: indexed)
    assert error < 0.9 * measure_error(model, positions)[0]
