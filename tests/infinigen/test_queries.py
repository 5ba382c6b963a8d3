"""A query projection makes the queries that attention gets, in every family of models that it does not refuse."""

import math
import os
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BartForConditionalGeneration,
    DynamicCache,
)

from kvcache_plugins.infinigen.queries import InputNorm, QueryProjection, find_attention_modules, first_of
from kvcache_plugins.models.layer_config import config_of_layer


# Error as a share of the largest query; the projection may sum in another order than the model
TOLERANCE = 1e-6
TOLERANCES = {torch.float32: TOLERANCE, torch.bfloat16: 2e-2}

COMMON = {"vocab_size": 128, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {**COMMON, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**LAYERS, "num_key_value_heads": 2}
# All heads together are wider than the hidden states
ROTARY = {**GROUPED, "head_dim": 24}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
HYBRID = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "linear_num_key_heads": 2}
LINEAR["linear_num_value_heads"] = 2
FALCON = {**COMMON, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED = {**ROTARY, **EXPERTS, "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
GATED.update(linear_key_head_dim=16, linear_value_head_dim=16, shared_expert_intermediate_size=32)
GPT2 = {**COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
OPT = {**LAYERS, "ffn_dim": 64, "word_embed_proj_dim": 64, "init_std": 0.2, "max_position_embeddings": 128}
PHI3 = {**GROUPED, "max_position_embeddings": 128, "original_max_position_embeddings": 128}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
GEMMA4 = {**ROTARY, **HYBRID, "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16}
GEMMA4["vocab_size_per_layer_input"] = 128
DBRX = {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 3}
DBRX["attn_config"] = {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0}
DBRX["ffn_config"] = {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 1}

FAMILIES = {
    "llama": ("llama", ROTARY),
    "llama-bias": ("llama", {**ROTARY, "attention_bias": True}),
    "mistral": ("mistral", ROTARY),
    "mixtral": ("mixtral", {**ROTARY, **EXPERTS}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", ROTARY),
    "qwen3-next": ("qwen3_next", GATED),
    "gemma3": ("gemma3_text", {**ROTARY, **HYBRID, "query_pre_attn_scalar": 100}),
    "gemma4": ("gemma4_text", GEMMA4),
    "phi": ("phi", {**GROUPED, "qk_layernorm": True}),
    "phi3": ("phi3", PHI3),
    "phi3-partial": ("phi3", {**PHI3, **PARTIAL}),
    "stablelm": ("stablelm", {**GROUPED, "qk_layernorm": True, "use_qkv_bias": True}),
    "olmo-clipped": ("olmo", {**GROUPED, "clip_qkv": 0.5}),
    "olmo2": ("olmo2", GROUPED),
    "cohere": ("cohere", {**GROUPED, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**GROUPED, **HYBRID}),
    "glm4": ("glm4", {**ROTARY, "attention_bias": True}),
    "smollm3": ("smollm3", {**GROUPED, "no_rope_layers": [1, 0, 1]}),
    "exaone4": ("exaone4", {**GROUPED, **HYBRID}),
    "exaone-moe": ("exaone_moe", {**GROUPED, **HYBRID, **EXPERTS, "first_k_dense_replace": 3}),
    "afmoe": ("afmoe", {**ROTARY, **HYBRID, **EXPERTS, "num_dense_layers": 3}),
    "cohere2-moe": ("cohere2_moe", {**GROUPED, **HYBRID, **EXPERTS}),
    "kolibri1": ("kolibri1", {**ROTARY, **HYBRID, **EXPERTS}),
    "granite": ("granite", {**GROUPED, "attention_multiplier": 0.1}),
    "hunyuan": ("hunyuan_v1_dense", ROTARY),
    "ernie4.5": ("ernie4_5", ROTARY),
    "opt": ("opt", OPT),
    "gpt2": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("gpt_neox", {**LAYERS, **PARTIAL}),
    "gpt-bigcode-multi-query": ("gpt_bigcode", GPT2),
    "gpt-bigcode": ("gpt_bigcode", {**GPT2, "multi_query": False}),
    "persimmon": ("persimmon", LAYERS),
    "falcon-multi-query": ("falcon", FALCON),
    "falcon-grouped": ("falcon", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}),
    "falcon-multi-head": ("falcon", {**FALCON, "multi_query": False}),
    "dbrx": ("dbrx", DBRX),
}
# Part of the fused projection that makes no queries, in its weight viewed by groups
FUSED = {"phi3": (1, 64), "gpt-neox": (4, 16), "gpt2": (1, 64), "gpt-bigcode": (4, 16), "dbrx": (1, 64)}

REFUSED = {
    "deepseek": ("deepseek_v3", {**ROTARY, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}, "compressed part"),
    "bloom": ("bloom", {**COMMON, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "`BloomAttention` .*ALiBi"),
    "mpt": ("mpt", {"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4}, "`MptAttention` .*ALiBi"),
    "falcon-alibi": ("falcon", {**FALCON, "alibi": True}, "ALiBi"),
    # Takes its angles since 5.24, and rotates queries and keys separately
    "gptj": ("gptj", {**GPT2, "rotary_dim": 8}, "looks up positions itself|no function `apply_rotary_pos_emb`"),
    "gpt-oss": ("gpt_oss", {**ROTARY, **EXPERTS}, "`sinks`"),
    "gemma2": ("gemma2", {**ROTARY, "attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` .* 50.0"),
    "ministral3": ("ministral3", ROTARY, "by their positions"),
    "beam": ("beam", {**ROTARY, **HYBRID, **EXPERTS}, "by their positions"),
    "llama4": (
        "llama4_text",
        {**ROTARY, **EXPERTS, "intermediate_size_mlp": 64},
        "no function `apply_rotary_pos_emb`",
    ),
    "inkling": ("inkling_text", {**ROTARY, **EXPERTS, "n_routed_experts": 2}, "relative positions"),
}


def build(model_type, fields, attn_implementation="sdpa"):
    """Make a random model whose biases and norms have an effect."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of Transformers has no `{model_type}`")
    config = CONFIG_MAPPING[model_type](**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.fixture
def capture(monkeypatch):
    """`capture(model)` runs the model once: the input and the queries of attention, by layer."""
    seen, current = {}, []

    def note_input(layer_idx):
        def hook(module, args, kwargs):
            current[:] = [layer_idx]
            seen[layer_idx] = types.SimpleNamespace(
                hidden_states=args[0] if args else kwargs["hidden_states"],
                position_embeddings=kwargs.get("position_embeddings"),
            )

        return hook

    real_attention = F.scaled_dot_product_attention

    def attention(query, *args, scale=None, **kwargs):
        if current:
            seen[current[0]].query = query
            seen[current[0]].scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return real_attention(query, *args, scale=scale, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)

    def run(model, input_ids=None, cache=None):
        seen.clear()
        handles = [
            module.register_forward_pre_hook(note_input(layer_idx), with_kwargs=True)
            for layer_idx, module in find_attention_modules(model).items()
        ]
        ids = torch.randint(3, 128, (2, 17)) if input_ids is None else input_ids
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=cache is not None)
        current.clear()
        for handle in handles:
            handle.remove()
        return dict(seen)

    return run


def projections(model):
    modules = find_attention_modules(model)
    config = model.config.get_text_config(decoder=True)
    return {index: QueryProjection(module, config_of_layer(config, index)) for index, module in modules.items()}


@torch.no_grad()
def errors(made, captured):
    """Largest difference by layer between queries made and those of attention, as a share of the largest query."""
    assert made.keys() == captured.keys()
    found = {}
    for layer_idx, seen in captured.items():
        own = made[layer_idx](seen.hidden_states, seen.position_embeddings)
        assert (own.shape, own.dtype) == (seen.query.shape, seen.query.dtype)
        found[layer_idx] = float((own - seen.query).abs().max() / seen.query.abs().max())
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_equal_those_of_attention_in_every_layer(family, dtype, capture):
    model = build(*FAMILIES[family]).to(dtype)
    made, cache = projections(model), DynamicCache(config=model.config)
    captured = capture(model, cache=cache)
    assert max(errors(made, captured).values()) <= TOLERANCES[dtype]
    for layer_idx, seen in captured.items():
        projection = made[layer_idx]
        assert (projection.num_heads, projection.head_dim) == (seen.query.shape[1], seen.query.shape[3])
        assert projection.scaling == pytest.approx(seen.scaling)
        projection.check(seen.hidden_states, seen.position_embeddings, seen.query)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("family", "rotates", "offset"),
    [
        ("llama", True, 0.0),
        ("gpt-neox", True, None),
        ("gemma3", True, 1.0),
        ("qwen3", True, 0.0),
        ("cohere2", False, None),
        ("glm4", False, 0.0),
        ("ernie4.5", False, 0.0),
        ("gpt2", False, None),
    ],
)
@torch.no_grad()
def test_single_queries_by_kernels_equal_attention(family, rotates, offset, capture, monkeypatch):
    """Kernels rotate halves, and norm by the root mean square; the modules do all else."""
    pytest.importorskip("triton")
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    model = build(*FAMILIES[family])
    made, captured = projections(model), capture(model)
    projection, seen = made[1], captured[1]
    assert projection._has_kernel == rotates
    # Norms of heads are the kernel's too
    assert (projection._norm_numbers is not None) == (family in ("gemma3", "qwen3"))
    embeddings = seen.position_embeddings
    last = None if embeddings is None else tuple(each[:, -1:] for each in embeddings)
    own = projection(seen.hidden_states[:, -1:], last)
    expected = seen.query[:, :, -1:]
    assert float((own - expected).abs().max() / expected.abs().max()) <= TOLERANCE
    layer = model.get_decoder().get_submodule("h.1" if family == "gpt2" else "layers.1")
    norm = first_of(layer, ("input_layernorm", "ln_1"))
    fused, states = InputNorm(norm), torch.randn(2, 1, 64)
    assert (None if fused._numbers is None else fused._numbers.offset) == offset
    torch.testing.assert_close(fused(states), norm(states), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [True, True, True]),
        ("gemma3", [True, True, True]),
        ("smollm3", [True, False, True]),
        ("cohere2", [True, True, False]),
        ("exaone4", [True, True, False]),
        ("opt", [False, False, False]),
        ("gpt2", [False, False, False]),
    ],
)
def test_has_rotary_is_true_if_queries_depend_on_position(family, expected, capture):
    model = build(*FAMILIES[family])
    captured, made = capture(model), projections(model)
    assert [projection.has_rotary for projection in made.values()] == expected
    for layer_idx, projection in made.items():
        hidden_states = captured[layer_idx].hidden_states
        angle = torch.full((2, 17, projection.head_dim), 0.5)
        turned = projection(hidden_states, (angle.cos(), angle.sin()))
        unturned = projection(hidden_states, None)
        assert torch.equal(turned, unturned) is not expected[layer_idx]


@pytest.mark.parametrize("family", FUSED)
def test_fused_projections_compute_queries_alone(family, capture):
    model = build(*FAMILIES[family])
    made, captured = projections(model), capture(model)
    with FlopCounterMode(display=False) as counter:
        made[0](captured[0].hidden_states, captured[0].position_embeddings)
    assert counter.get_total_flops() == 2 * (2 * 17) * 64 * 64
    num_groups, num_features = FUSED[family]
    for projection in made.values():
        parameters = [projection._projection.weight, projection._projection.bias]
        for parameter in filter(lambda parameter: parameter is not None, parameters):
            # Only `Conv1D` keeps its weight with the outputs last; biases have nothing else
            rows = parameter.data.movedim(-1, 0) if family == "gpt2" else parameter.data
            rows.unflatten(0, (num_groups, -1))[:, num_features:] = math.nan
    assert max(errors(made, captured).values()) <= TOLERANCE


class WholeWeight(nn.Parameter):
    """A weight that cannot be split, such as a quantized one."""

    def __getitem__(self, index):
        raise NotImplementedError


def replace_forward(projection):
    """Replace `forward`, as Accelerate does to load weights."""
    forward = projection.forward
    projection.forward = lambda hidden_states: 2 * forward(hidden_states) + 1


def replace_type(projection):
    class Adapted(type(projection)):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states) + 1

    projection.__class__ = Adapted


CHANGES = {
    "hook_output": lambda projection: projection.register_forward_hook(lambda module, args, output: 2 * output + 1),
    "hook_input": lambda projection: projection.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,)),
    "replace_forward": replace_forward,
    "replace_type": replace_type,
    "replace_weight": lambda projection: setattr(projection, "weight", WholeWeight(2 * projection.weight.data)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", *FUSED])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modified_projections_compute_the_queries(family, change, capture):
    model = build(*FAMILIES[family])
    ids = torch.arange(3, 20)[None]
    made, before = projections(model), capture(model, ids)
    for projection in made.values():
        change(projection._projection)
    captured = capture(model, ids)
    assert not torch.equal(before[0].query, captured[0].query)
    assert max(errors(made, captured).values()) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", *FUSED])
def test_weights_are_not_copied(family, capture):
    model = build(*FAMILIES[family])
    made = projections(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert max(errors(made, capture(model)).values()) <= TOLERANCE


@pytest.mark.parametrize("family", REFUSED)
def test_refuses_attention_that_queries_do_not_determine(family):
    model_type, fields, message = REFUSED[family]
    # Every model has this attention
    model = build(model_type, fields, attn_implementation="eager")
    with pytest.raises(ValueError, match=message):
        projections(model)


def test_refuses_capped_scores_only_where_attention_caps_them():
    fields = {**ROTARY, "attn_logit_softcapping": 50.0}
    assert len(projections(build("gemma3_text", fields))) == 3
    with pytest.raises(ValueError, match="`attn_logit_softcapping` .* 50.0"):
        projections(build("gemma3_text", fields, "eager"))


def test_unreadable_modules_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="`LlamaMLP` .* none of the query projections `q_proj`, `qkv_proj`"):
        QueryProjection(tiny_llama.model.layers[0].mlp, tiny_llama.config)
    attention = find_attention_modules(tiny_llama)[1]
    del attention.scaling
    with pytest.raises(ValueError, match="`LlamaAttention` of layer 1 .* has no `scaling`"):
        QueryProjection(attention, tiny_llama.config)
    attention.q_proj = nn.Linear(128, 192)
    with pytest.raises(ValueError, match="`q_proj` of `LlamaAttention` of layer 1 has 192 outputs, not 128"):
        QueryProjection(attention, tiny_llama.config)


def test_only_attention_layers_of_hybrid_models_are_found():
    assert [*find_attention_modules(build(*FAMILIES["qwen3-next"]))] == [3]
    assert [*find_attention_modules(build("olmo_hybrid", {**GROUPED, **LINEAR}))] == [1]


def test_cross_attention_is_not_found():
    model = build("gpt2", {**GPT2, "add_cross_attention": True})
    assert [module.is_cross_attention for module in find_attention_modules(model).values()] == [False] * 3


def test_text_decoder_of_a_multimodal_model_is_found():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CONFIG_MAPPING["gemma4"](text_config=GEMMA4, vision_config=vision, audio_config=None)
    model = AutoModelForImageTextToText.from_config(config)
    found = find_attention_modules(model)
    assert [type(module).__name__ for module in found.values()] == ["Gemma4TextAttention"] * 3
    assert {module.layer_idx for module in model.modules() if type(module).__name__ == "Gemma4VisionAttention"}
    assert [projection.head_dim for projection in projections(model).values()] == [24, 24, 32]


def test_refuses_models_whose_attention_modules_are_ambiguous():
    mamba = build("mamba", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}, "eager")
    with pytest.raises(ValueError, match="`MambaForCausalLM` has no attention modules"):
        find_attention_modules(mamba)
    bart = {"vocab_size": 128, "d_model": 64, "decoder_layers": 1, "encoder_layers": 1, "decoder_attention_heads": 4}
    with pytest.raises(ValueError, match="two attention modules of `BartForCausalLM` have the `layer_idx` 0"):
        find_attention_modules(build("bart", bart))
    encoder_decoder = BartForConditionalGeneration(CONFIG_MAPPING["bart"](**bart, encoder_attention_heads=4))
    with pytest.raises(ValueError, match="`BartForConditionalGeneration` has an encoder"):
        find_attention_modules(encoder_decoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_check_refuses_wrong_queries(dtype, capture):
    model = build(*FAMILIES["qwen3"]).to(dtype)
    made, captured = projections(model), capture(model)
    seen = captured[1]
    wrong = {
        "of another layer": (seen.hidden_states, seen.position_embeddings, captured[0].query),
        "not rotated": (seen.hidden_states, None, seen.query),
        "not scaled": (seen.hidden_states, seen.position_embeddings, 1.2 * seen.query),
    }
    for arguments in wrong.values():
        with pytest.raises(ValueError, match="`Qwen3Attention` of layer 1 makes its queries in a way .* not known"):
            made[1].check(*arguments)
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="queries of `Qwen3Attention` of layer 1 hold NaN or infinity"):
            made[1].check(seen.hidden_states, seen.position_embeddings, number * seen.query)
    with pytest.raises(ValueError, match=r"`Qwen3Attention` of layer 1 have the shape \(2, 2, 17, 24\), not"):
        made[1].check(seen.hidden_states, seen.position_embeddings, seen.query[:, :2])


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_queries_equal_those_of_pretrained_models(name, request, capture):
    model, tokenizer = request.getfixturevalue(name)
    ids = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt").input_ids
    captured = capture(model, ids)
    assert len(captured) == model.config.num_hidden_layers
    made = projections(model)
    for layer_idx, seen in captured.items():
        made[layer_idx].check(seen.hidden_states, seen.position_embeddings, seen.query)
    assert max(errors(made, captured).values()) <= TOLERANCE


def test_norm_without_weights_is_called_as_it_is():
    norm = build("olmo", GROUPED).model.layers[0].input_layernorm
    states = torch.randn(2, 1, norm.normalized_shape[0])
    assert not hasattr(norm, "weight")
    assert torch.equal(InputNorm(norm)(states), norm(states))
