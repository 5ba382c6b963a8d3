"""Text in, text out, on a real model: the pipeline, streamers, and chats whose cache is kept between turns."""

import threading

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, pipeline

from kvcache_plugins import GEARCache, create_cache


OPTIONS = {"max_new_tokens": 6, "do_sample": False}
TEXT = (
    "The ship left the harbour before dawn with a cargo of salt, rope and letters. Nobody on the quay could say how "
    "long she would be gone, but every family had counted the barrels of water, and 41 barrels meant four months at "
    "sea. In the second week the wind turned north. The captain, who kept two watches and trusted neither, wrote"
)


@pytest.fixture(scope="module")
def pipe(smollm2):
    model, tokenizer = smollm2
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


@pytest.fixture(params=["gear-2bit", "infinigen"])
def cache(request, smollm2):
    cache = create_cache(request.param, smollm2[0])
    yield cache
    # The model is shared with other tests
    if request.param == "infinigen":
        cache.detach()


def test_pipeline_and_streamers_return_the_text_of_generate(cache, pipe, smollm2):
    model, tokenizer = smollm2
    inputs = tokenizer(TEXT, return_tensors="pt")
    length = inputs.input_ids.shape[1]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {**inputs, **OPTIONS, "past_key_values": cache, "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    assert cache.get_seq_length() == length + OPTIONS["max_new_tokens"] - 1

    cache.reset()
    piped = pipe(TEXT, past_key_values=cache, return_full_text=False, **OPTIONS)[0]["generated_text"]
    assert piped == streamed
    assert cache.stats()["attend_calls"] > 0


class Recorder(TextStreamer):
    """Keeps the text instead of printing it."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text, stream_end=False):
        self.text += text


def converse(smollm2, cache):
    """Two turns with one cache: what was said, and the tokens of both turns."""
    model, tokenizer = smollm2
    chat, seen = [], torch.empty(1, 0, dtype=torch.long)
    for question in ("Name a colour.", "And another?"):
        chat.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        # The new prompt must begin with the tokens of the cache
        held = cache.get_seq_length()
        assert torch.equal(inputs.input_ids[:, :held], seen[:, :held])
        streamer = Recorder(tokenizer)
        seen = model.generate(**inputs, past_key_values=cache, streamer=streamer, **OPTIONS)
        assert cache.get_seq_length() == seen.shape[1] - 1
        chat.append({"role": "assistant", "content": streamer.text})
    return chat, seen


def test_chat_keeps_its_cache_between_turns(smollm2):
    model, _ = smollm2
    exact = GEARCache(model.config, nbits=2, q_group_size=64, residual_length=128)
    chat, tokens = converse(smollm2, exact)
    assert exact.stats()["tokens_compressed"] == 0
    expected_chat, expected = converse(smollm2, DynamicCache(config=model.config))
    assert (chat, tokens.tolist()) == (expected_chat, expected.tolist())
