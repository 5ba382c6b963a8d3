"""Encoder-decoders: a cache for the decoder's own tokens inside an `EncoderDecoderCache`; alone it is refused."""

import warnings

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache

from kvcache_plugins import create_cache


# Options with which tokens equal the dense cache's
SAME = {
    "gear-4bit": {"nbits": 8, "residual_length": 16},
    "infinigen": {"alpha": float("inf"), "max_fetch_ratio": 1.0, "recent": 8, "full_layers": ()},
    "h2o": {"heavy_ratio": 0.5, "recent_ratio": 0.5},
}


COMMON = {"vocab_size": 128, "d_model": 64, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1}
MODELS = {
    "bart": {
        **{"encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 256, "init_std": 0.2},
        **{"bos_token_id": 1, "forced_eos_token_id": None},
    },
    # Scores have biases of positions
    "t5": {
        **{"d_kv": 16, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4},
        "initializer_factor": 2.0,
    },
}


def make_model(family):
    """A random model of 3 and 2 layers, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[family](**COMMON, **MODELS[family])).eval()


def generate(model, input_ids, decoder_input_ids, cache):
    decoder_input_ids[:, 0] = model.config.decoder_start_token_id
    return model.generate(
        input_ids, decoder_input_ids=decoder_input_ids, past_key_values=cache, max_new_tokens=8, do_sample=False
    )


def made(name, model, **options):
    with warnings.catch_warnings():
        # That InfiniGen chooses by the layers' own queries
        warnings.simplefilter("ignore")
        return create_cache(name, model, **options)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_decoder_self_attention_uses_the_cache(family, implementation, name, prompt):
    model = make_model(family)
    source, start = prompt(30), prompt(100, seed=1)
    model.set_attn_implementation(implementation)
    expected = generate(model, source, start, EncoderDecoderCache(DynamicCache(), DynamicCache()))
    own = made(name, model, **SAME[name])
    assert len(own.layers) == 2
    assert torch.equal(generate(model, source, start, EncoderDecoderCache(own, DynamicCache())), expected)
    stats = own.stats()
    assert stats["dense_reads"] == 0
    assert own.get_seq_length() == 100 + 7
    did = {"gear-4bit": "tokens_compressed", "infinigen": "selected_calls", "h2o": "tokens_kept"}
    assert stats[did[name]] > 0


@pytest.mark.parametrize("name", ["gear-2bit", "infinigen", "h2o"])
def test_a_cache_without_encoder_decoder_wrapper_is_refused(name, prompt):
    bart = make_model("bart")
    cache = made(name, bart)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"decoder's own tokens.*`EncoderDecoderCache\(cache, D"):
            generate(bart, prompt(30), prompt(100, seed=1), cache)
        cache.reset()
