"""Options of the `transform` backbone."""

import pytest
from transformers import LlamaConfig

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.gear.config import TransformConfig
from kvcache_plugins.layers.compressed_layer import CompressedLayer


def test_bits_are_rounded_to_whole_blocks():
    config = TransformConfig(key_nbits=2.4, value_nbits=2)
    assert config.code_bytes(64, 64) == (19, 16)
    assert config.code_bytes(20, 64)[0] == 7
    # A row is a word at least, and eight bits a channel at most
    assert TransformConfig(key_nbits=0.1, value_nbits=8).code_bytes(64, 20) == (3, 24)


def test_one_side_alone_has_no_such_backbone():
    with pytest.raises(ValueError, match="key_backbone"):
        GEARCache(key_backbone="transform")


def test_presets_and_frequencies_of_a_config():
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2, rope_parameters=None)
    cache = create_cache("gear-t16", config)
    assert all(isinstance(layer, CompressedLayer) for layer in cache.layers)
    assert all(len(layer.packing.codecs.frequencies) == 32 for layer in cache.layers)
    assert cache.gear_config == TransformConfig(key_nbits=2.375, value_nbits=2.0)
    assert GEARCache(backbone="transform")._next_layer().packing.codecs.frequencies is None


def test_options_make_the_same_config():
    config = TransformConfig(key_nbits=2.375, value_nbits=2, residual_length=3, num_sink_tokens=0)
    assert GEARCache(**config.to_options()).gear_config == config
    assert config.shortest_prompt == 64
    config = TransformConfig(key_nbits=2.23, value_nbits=2.23, quantizer="trellis")
    assert GEARCache(**config.to_calibrated_options()).gear_config == config
