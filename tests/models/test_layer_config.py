"""Fields with values for each layer: the places that read them, and their results."""

import ast
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcache_plugins import predict_memory
from kvcache_plugins.kv_runahead.planner import CostModel, bytes_of_token
from kvcache_plugins.layers.layer_factory import key_value_heads
from kvcache_plugins.models.fingerprint import config_fingerprint
from kvcache_plugins.models.layer_config import config_of_layer, configs_of_layers, head_dims
from kvcache_plugins.models.rotary_frequencies import rotary_embedding


ROOT = Path(__file__).resolve().parents[2]
# Fields of a decoder as a whole
OF_DECODERS = {
    *("hidden_size", "is_encoder_decoder", "layer_types", "max_position_embeddings", "num_decoder_layers"),
    *("num_hidden_layers", "pad_token_id", "vocab_size"),
}
# Names of what may be a decoder's config, and calls that return one
_CONFIGS = {"config", "_config", "text_config", "decoder_config", "_decoder_config", "get_text_config", "load_config"}


def reads_of_decoders(source: str, fields: set[str]) -> Iterator[tuple[int, str]]:
    """Lists, by line, fields that are read from a config that is not called a layer's; `*` is any."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            base, field = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            base = node.args[0]
            field = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else "*"
        else:
            continue
        base = base.func if isinstance(base, ast.Call) else base
        name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        if name in _CONFIGS and field in fields - OF_DECODERS:
            yield node.lineno, field


def test_reads_of_decoders_are_found() -> None:
    source = """
def read(config, layer_config, model, name):
    config.head_dim, config.vocab_size, layer_config.head_dim
    getattr(config, "head_dim", None), getattr(config, name, None), getattr(layer_config, name)
    model.config.head_dim
    model.config.get_text_config(decoder=True).head_dim
    """
    lines = [line for line, _ in reads_of_decoders(source, {"head_dim", "vocab_size", "*"})]
    assert sorted(lines) == [3, 4, 4, 5, 6]


def test_fields_that_layers_may_have_are_read_from_layers(released_configs) -> None:
    fields = {"*"}
    for config in released_configs.values():
        fields |= {field.name for field in dataclasses.fields(config)} | (config.per_layer_attributes or set())
    found = [
        f"{path.relative_to(ROOT)}:{line} reads `{field}`"
        for folder in ("src", "eval")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, field in reads_of_decoders(path.read_text(), fields)
    ]
    assert found == []


def test_every_default_config_can_be_read(released_configs) -> None:
    for name, config in released_configs.items():
        config_fingerprint(config)
        # Transformers' own cache of blt cannot be made either
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name != "blt":
            text_config = config.get_text_config(decoder=True)
            assert all(dim > 0 for dim in head_dims(text_config)), name
            assert all(count > 0 for count in key_value_heads(text_config)), name
            for index in range(text_config.num_hidden_layers):
                rotary_embedding(text_config, index)


def heterogeneous(configs: dict[str, PreTrainedConfig]) -> list[str]:
    return [name for name, config in configs.items() if config.get_text_config(decoder=True).is_heterogeneous]


def test_bytes_of_a_token_sum_over_layers(released_configs) -> None:
    names = heterogeneous(released_configs)
    assert {"gemma4_text", "embedding_gemma2_text", "neomme"} <= set(names)
    # Transformers 5.20 lacks this family
    assert ("dots3_note_text" in names) == ("dots3_note_text" in CONFIG_MAPPING)
    for name in names:
        text_config = released_configs[name].get_text_config(decoder=True)
        if name.endswith("_encoder"):
            continue
        layers = configs_of_layers(text_config)
        sizes = [2 * 2 * (layer.num_key_value_heads or layer.num_attention_heads) * layer.head_dim for layer in layers]
        assert bytes_of_token(released_configs[name], torch.bfloat16) == sum(sizes) // len(sizes), name


def test_layers_are_read_one_by_one() -> None:
    config = LlamaConfig(
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_size=64,
        per_layer_config={0: {"num_key_value_heads": 8}, 2: {"head_dim": 32, "num_key_value_heads": 2}},
    )
    assert [config_of_layer(config, index).num_key_value_heads for index in range(3)] == [8, 4, 2]
    assert head_dims(config) == {8, 32}
    assert key_value_heads(config) == {2, 4, 8}
    assert bytes_of_token(config, torch.float32) == 2 * 4 * (8 * 8 + 4 * 8 + 2 * 32) // 3
    assert [len(rotary_embedding(config, index).frequencies) for index in range(3)] == [4, 4, 16]


def test_fingerprints_differ_where_layers_do() -> None:
    plain = LlamaConfig(num_hidden_layers=3)
    own = [copy.deepcopy(plain) for _ in range(3)]
    own[0].per_layer_config = {0: {"head_dim": 64}}
    own[1].per_layer_config = {1: {"head_dim": 64}}
    own[2].per_layer_config = {1: {"head_dim": 64, "num_key_value_heads": 8}}
    assert len({config_fingerprint(config) for config in (plain, *own)}) == 4
    assert config_fingerprint(own[0]) == config_fingerprint(copy.deepcopy(own[0]))


def test_costs_sum_over_layers() -> None:
    """Read three layers with a window of 32; the last has heads four times as wide."""
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    own = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 64, "layer_types": kinds}
    cost = CostModel.of_shapes(Gemma4TextConfig(**sizes, **heads, **own))
    assert cost.per_pair == 4 * 4 * 64
    # Queries, output, keys and values of channels of all heads, and MLP
    weights = 64 * 64 * (4 + 4 + 2 + 2) // 4 * 2 + 64 * 256 * 2 + 64 * 128 * 2 + 3 * 3 * 64 * 64
    assert cost.per_token == 2 * weights + 2 * 4 * 4 * 16 * 32


@pytest.mark.parametrize(
    ("family", "cache"),
    [("gemma4_text", "transform"), ("gemma4_text", "infinigen-transform"), ("dots3_note_text", "transform")],
)
def test_memory_is_predicted_for_released_configs(family: str, cache: str, released_configs) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers lacks `{family}`")
    dense = predict_memory(released_configs[family], "dynamic", 1000)
    assert 0 < predict_memory(released_configs[family], cache, 1000).total_bytes < dense.total_bytes
