"""Encoder-decoders: a cache for the decoder's own tokens inside an `EncoderDecoderCache`; alone it is refused."""

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache

from kvcache_plugins import GEARCache, create_cache


@pytest.fixture(scope="module")
def bart():
    """A random BART of 2 and 2 layers, in eval mode."""
    config = BartConfig(
        vocab_size=128,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=256,
        init_std=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BartForConditionalGeneration(config).eval()


def generate(model, input_ids, decoder_input_ids, cache):
    decoder_input_ids[:, 0] = model.config.decoder_start_token_id
    return model.generate(
        input_ids, decoder_input_ids=decoder_input_ids, past_key_values=cache, max_new_tokens=8, do_sample=False
    )


def test_inside_an_encoder_decoder_cache(bart, prompt):
    source, start = prompt(30), prompt(12, seed=1)
    expected = generate(bart, source, start, EncoderDecoderCache(DynamicCache(), DynamicCache()))
    own = GEARCache(nbits=2)
    assert torch.equal(generate(bart, source, start, EncoderDecoderCache(own, DynamicCache())), expected)
    assert own.get_seq_length() == 12 + 7


def test_compresses_inside_an_encoder_decoder_cache(bart, prompt):
    source, start = prompt(30), prompt(100, seed=1)
    own = GEARCache(nbits=8)
    tokens = generate(bart, source, start, EncoderDecoderCache(own, DynamicCache()))
    expected = generate(bart, source, start, EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert own.stats()["tokens_compressed"] > 0
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", ["gear-2bit", "infinigen", "h2o"])
def test_refused_alone(name, bart):
    with pytest.raises(ValueError, match=r"has an encoder.*EncoderDecoderCache"):
        create_cache(name, bart)
