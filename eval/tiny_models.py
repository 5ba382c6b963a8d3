"""Tiny random models of every family that Transformers has, and prompts for them.

A tiny model has its family's defaults, with all large sizes replaced. Configs of Transformers share field names, so
that one table of names serves nearly all families; `SPECIAL_FIELDS` has further fields of some families. A model has
two layers of each kind of the family, in the family's order.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from .media import START, TOKEN, find_media, media_of


# Classes of models that take more than tokens, and their families; the first class with a family counts
_MEDIA_CLASSES: tuple[tuple[Any, Mapping[str, object]], ...] = (
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    (AutoModelForSpeechSeq2Seq, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
)

HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 64, 4, 16
VOCAB_SIZE = 97

_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_block_layers "
    "num_encoder_layers"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads"
)
# Sizes by name, the same in all configs
_NAMES_BY_SIZE = {
    2: f"{_LAYERS} depth index_n_heads linear_num_key_heads n_mamba_heads num_key_value_groups num_kv_shared_layers",
    HIDDEN_SIZE: (
        "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim dim_model embed_dim lru_width "
        "attention_hidden_size embedding_dim hidden_dim index_topk out_hidden_size vision_output_dim projection_dim "
        "projector_input_dim projector_output_dim projector_hidden_size projection_hidden_size encoder_hidden_size "
        "output_dim image_token_embed_dim"
    ),
    96: (
        "intermediate_size n_inner d_ff ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim moe_intermediate_size "
        "dim_ff shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size dff block_ff_dim "
        "intermediate_size_mlp moe_shared_expert_intermediate_size dense_intermediate_size"
    ),
    # A token has all experts, as the choice of some would depend on rounding
    NUM_HEADS: (
        f"{_HEADS} mm_tokens_per_image num_query_tokens num_experts num_local_experts n_routed_experts "
        "moe_num_experts num_experts_per_tok moe_k moe_topk "
        "num_experts_per_token top_k top_k_experts moe_top_k"
    ),
    VOCAB_SIZE: "vocab_size n_words vocab_size_per_layer_input",
    HEAD_DIM: (
        "hidden_size_per_layer_input mamba_d_state mamba_chunk_size chunk_size ssm_state_size state_size "
        "head_dim swa_head_dim d_kv kv_channels attention_head_dim qk_nope_head_dim v_head_dim index_head_dim "
        "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"
    ),
    2 * HEAD_DIM: "global_head_dim router_hidden_size kv_lora_rank",
    512: "n_ctx n_positions max_position_embeddings max_seq_len max_target_positions original_max_position_embeddings",
    24: "sliding_window window_size attention_window_size attention_chunk_size sliding_window_size q_lora_rank",
    1: "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups mamba_ngroups n_groups",
    0: "num_nextn_predict_layers",
    8: "adapter_rank laurel_rank qk_rope_head_dim mamba_n_heads mamba_num_heads mamba_dt_rank",
    8 * HEAD_DIM: "mamba_d_ssm",
    28: "image_size",
    14: "patch_size",
}
_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
# Sharp enough that a wrong key changes the logits
_INITIALIZER_RANGE = 0.1
# Fields by `model_type` that do not follow from the table; they win over it
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_ALL_EXPERTS = {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
_ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
SPECIAL_FIELDS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 4}},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": _ALL_EXPERTS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4},
    **dict.fromkeys(("exaone4_5_vision", "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision"), {"window_size": 56}),
    "deepseek_ocr2_sam_vision_model": {"output_channels": 16, "downsample_channels": [32, HIDDEN_SIZE]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], **_ALL_EXPERTS},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROTARY, "mrope_section": [3, 3, 2]}},
    **dict.fromkeys(
        ("cosmos3_edge_text", "glm4v_text", "glm_ocr_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"),
        {"rope_parameters": {**_ROTARY, "mrope_section": [2, 3, 3]}},
    ),
    "glm4v_moe_text": {"rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "gemma4_text": {"global_head_dim": 2 * HEAD_DIM, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM, "num_kv_shared_layers": 2},
    "gemma4_unified_vision": {"mm_embed_dim": HIDDEN_SIZE, "output_proj_dims": HIDDEN_SIZE},
    "glm5_next_text": {"linear_num_heads": NUM_HEADS, "linear_head_dim": HEAD_DIM},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _ALTERNATING,
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 4},
    "glmasr_encoder": {"intermediate_size": 4 * HIDDEN_SIZE},
    **dict.fromkeys(("internvl_vision", "qianfan_ocr_vision"), {"image_size": (28, 28), "patch_size": (14, 14)}),
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), {"image_grid_pinpoints": [[28, 28]]}),
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"num_key_value_heads": 2},
    "qwen3_asr_encoder": {"n_window": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 6},
    "vipllava": {"vision_feature_layer": [-1, -2]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * HIDDEN_SIZE, "attention_head_dim": 2 * HEAD_DIM},
    "zaya": {"num_experts_per_tok": 1},
}
# Parts that a family's default config lacks
_PARTS = {
    "gemma4": {"vision_config": "gemma4_vision"},
    "gemma4_unified": {"vision_config": "gemma4_unified_vision"},
}
_KEY_VALUE_HEADS = "num_key_value_heads n_head_kv num_kv_heads swa_num_key_value_heads num_global_key_value_heads"
_KINDS = ("layer_types", "layers_block_type")


def family_names() -> list[str]:
    """List the `model_type` of every decoder that the installed Transformers has."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def media_family_names() -> list[str]:
    """List the `model_type` of every family that the installed Transformers has for pictures, sounds or encoders."""
    return sorted({name for _, names in _MEDIA_CLASSES for name in names})


def build_family(family: str, seed: int = 0, *, has_media: bool = False) -> PreTrainedModel:
    """Build a tiny random model of a family, without a change of PyTorch's global generator."""
    auto_class: Any = AutoModelForCausalLM
    if has_media:
        auto_class = next(each for each, names in _MEDIA_CLASSES if family in names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: Any = {name: CONFIG_MAPPING[part]() for name, part in _PARTS.get(family, {}).items() if has_media}
        model = auto_class.from_config(_shrink(CONFIG_MAPPING[family](**parts)), dtype=torch.float32).eval()
        if has_media:
            find_media(model)
    return model  # type: ignore[no-any-return]


def prompt(model: PreTrainedModel, length: int, seed: int, *, has_media: bool = True) -> torch.Tensor:
    """Draw random tokens `[1, length]` without special ones, and placeholders if the model takes pictures."""
    media = media_of(model)
    vocab_size = min(model.config.get_text_config(decoder=True).vocab_size, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, vocab_size - 1, (1, length), generator=generator, device="cpu")
    if model.config.is_encoder_decoder and has_media:
        tokens[:, 0] = START
    if media is None or not has_media:
        return tokens
    return torch.cat([tokens[:, :5], tokens.new_full((1, media.num_tokens), TOKEN), tokens[:, 5:]], dim=1)


def _shrink(default: PreTrainedConfig) -> PreTrainedConfig:
    """Make a config of the same class as a default one, with all sizes small."""
    fields = {field.name: _value(default, field) for field in dataclasses.fields(default) if field.init}
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = _shrink(value)
        elif name == "is_decoder":
            # Some models can be encoders too
            small[name] = True
        elif name in ("initializer_range", "init_std") and isinstance(value, float):
            small[name] = _INITIALIZER_RANGE
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            small[name] = _SIZES[name]
        elif name.endswith("_token_id") and isinstance(value, int):
            small[name] = min(value, VOCAB_SIZE - 1)
    small |= _key_value_heads(fields)
    small |= _layers(default, fields)
    small |= SPECIAL_FIELDS.get(default.model_type, {})
    return type(default)(**small)


def _value(default: PreTrainedConfig, field: dataclasses.Field[Any]) -> Any:
    """Return a field's value, or the default of the class if layers have different values."""
    try:
        return getattr(default, field.name)
    except (AttributeError, RuntimeError):
        return None if field.default is dataclasses.MISSING else field.default


def _key_value_heads(fields: dict[str, Any]) -> dict[str, int]:
    """Return key/value heads: one if the default is one, all if it has as many as query heads, else half."""
    num_heads = next((fields[name] for name in _HEADS.split() if isinstance(fields.get(name), int)), None)
    small = {}
    for name in _KEY_VALUE_HEADS.split():
        count = fields.get(name)
        if isinstance(count, int):
            small[name] = 1 if count == 1 else NUM_HEADS if count == num_heads else NUM_HEADS // 2
    return small


def _layers(default: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields for two layers of each kind, if a config lists kinds, and its other lists for these layers."""
    kinds = next((fields[name] for name in _KINDS if isinstance(fields.get(name), list)), None)
    if kinds is None:
        return {}
    places = [[index for index, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)]
    # Each kind once, then again: layers that share states of others come last
    kept = [each[turn] for turn in (0, 1) for each in places if turn < len(each)]
    counts = {name: len(kept) for name in _LAYERS.split()[:1] if name in fields}
    lists = {
        name: [value[index] for index in kept]
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == len(kinds)
    }
    return counts | lists
