"""`compressed_by_default`: every `generate` of a block has a compressed cache, of one thread and until its end."""

import contextvars
import threading
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    StaticCache,
    TextGenerationPipeline,
    pipeline,
)

from kvcache_plugins import TransformCodingCache, compressed_by_default, create_cache, generate_with


HUB = Path(__file__).resolve().parents[1] / "hub"
OWN = GenerationMixin._prepare_cache_for_generation


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert GenerationMixin._prepare_cache_for_generation is OWN


def generate(model, ids, **options):
    return model.generate(
        ids, max_new_tokens=8, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **options
    )


def random_ids(length=150):
    return torch.randint(3, 97, (1, length))


def test_every_generate_has_a_fresh_cache_of_the_model(tiny_model):
    for model in (tiny_model("llama"), tiny_model("gemma3-hybrid")):
        ids = random_ids()
        with compressed_by_default("transform", residual_length=16):
            found = [generate(model, ids, **options) for options in ({}, {"num_beams": 2})]
        for output, options in zip(found, ({}, {"num_beams": 2}), strict=True):
            cache = output.past_key_values
            assert type(cache) is TransformCodingCache and cache.stats()["tokens_compressed"] > 0
            assert cache.cache_config.residual_length == 16 and len(cache.layers) == model.config.num_hidden_layers
            given = create_cache("transform", model, residual_length=16)
            assert torch.equal(output.sequences, generate(model, ids, past_key_values=given, **options).sequences)
    assert type(generate(model, ids).past_key_values) is DynamicCache


def test_explicit_caches_take_precedence(tiny_llama):
    ids, given = random_ids(), DynamicCache(config=tiny_llama.config)
    with compressed_by_default("transform"):
        assert generate(tiny_llama, ids, past_key_values=given).past_key_values is given
        assert type(generate(tiny_llama, ids, cache_implementation="static").past_key_values) is StaticCache
        assert generate(tiny_llama, ids, use_cache=False).past_key_values is None
        # A forward without `generate` has the cache that the model makes
        assert type(tiny_llama(ids, use_cache=True).past_key_values) is DynamicCache


def test_only_decoder_self_attention_is_compressed(monkeypatch, tmp_path):
    fields = {"encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    fields |= {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 256}
    fields |= {"vocab_size": 128, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1, "init_std": 0.2}
    fields |= {"decoder_start_token_id": 1, "forced_eos_token_id": None}
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING["bart"](**fields)).eval()
    source, start = random_ids(30), random_ids(100)
    start[:, 0] = 1
    given = EncoderDecoderCache(create_cache("gear-2bit", model), DynamicCache())
    expected = generate(model, source, decoder_input_ids=start, past_key_values=given)
    with compressed_by_default("gear-2bit"):
        by_default = generate(model, source, decoder_input_ids=start)
    custom = generate(model, source, decoder_input_ids=start, custom_generate=generate_with("gear-2bit"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    of_folder = {"custom_generate": str(HUB), "trust_remote_code": True, "cache": "gear-2bit"}
    of_hub = generate(model, source, decoder_input_ids=start, **of_folder)
    for output in (by_default, custom, of_hub):
        cache = output.past_key_values
        assert cache.self_attention_cache.stats()["tokens_compressed"] > 0
        assert type(cache.cross_attention_cache) is DynamicCache
        assert torch.equal(output.sequences, expected.sequences)
    with pytest.raises(ValueError, match="was also given a EncoderDecoderCache"):
        generate(model, source, past_key_values=given, custom_generate=generate_with("gear-2bit"))


def test_pipelines_use_the_default_cache(smollm2):
    model, tokenizer = smollm2
    text = "The moon goes round the earth, and the earth goes round the sun. " * 8
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert isinstance(pipe, TextGenerationPipeline)
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    with compressed_by_default("transform-16"):
        found = [pipe(text, **options)[0]["generated_text"] for _ in range(2)]
    cache = create_cache("transform-16", model)
    assert found == 2 * [pipe(text, past_key_values=cache, **options)[0]["generated_text"]]
    assert cache.get_seq_length() > 100


# Drafts are taken back, which a window has to record
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3-hybrid"])
def test_an_assistant_drafts_into_a_compressed_cache(tiny_model, architecture):
    model, assistant = tiny_model("llama"), tiny_model(architecture)
    ids = random_ids()
    with compressed_by_default("gear-4bit", nbits=8):
        output = generate(model, ids, assistant_model=assistant)
        alone = generate(model, ids)
    assert torch.equal(output.sequences, alone.sequences)
    assert output.past_key_values.stats()["tokens_compressed"] > 0


def test_a_block_is_of_one_thread_and_of_no_other_block(tiny_llama):
    ids, kinds = random_ids(), []
    inside, ended = threading.Event(), threading.Event()

    def work():
        kinds.append(type(generate(tiny_llama, ids).past_key_values))
        with compressed_by_default("gear-2bit"):
            inside.set()
            assert ended.wait(300)
            kinds.append(type(generate(tiny_llama, ids).past_key_values))
        kinds.append(type(generate(tiny_llama, ids).past_key_values))

    with compressed_by_default("transform"):
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(300)
        with pytest.raises(ValueError, match="in another such block"), compressed_by_default("gear-2bit"):
            pass
        assert type(generate(tiny_llama, ids).past_key_values) is TransformCodingCache
    # The other thread's block is still open
    assert type(generate(tiny_llama, ids).past_key_values) is DynamicCache
    ended.set()
    thread.join()
    assert [kind.__name__ for kind in kinds] == ["DynamicCache", "GEARCache", "DynamicCache"]


def test_the_default_is_restored_after_errors(tiny_llama):
    for name, options, message in (("geer", {}, "Unknown cache"), ("gear", {"rnak": 2}, "rnak")):
        with pytest.raises(ValueError, match=message), compressed_by_default(name, **options):
            pass
    with pytest.raises(ZeroDivisionError), compressed_by_default("transform"):
        generate(tiny_llama, random_ids())
        raise ZeroDivisionError
    assert type(generate(tiny_llama, random_ids()).past_key_values) is DynamicCache


def test_a_block_that_ends_in_another_context_leaves_nothing():
    block = compressed_by_default("transform")
    contextvars.copy_context().run(block.__enter__)
    with pytest.raises(ValueError, match="different Context"):
        block.__exit__(None, None, None)
