"""Layers with a window, of Transformers' own, beside compressed ones whose steps are replayed; see
`test_captured_steps.py`."""

import copy

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import GEARCache
from kvcache_plugins.gear.recorded_step import RecordedStep
from kvcache_plugins.gear.transform.layer import TransformLayer


@pytest.mark.each_value
@pytest.mark.parametrize("padding", [0, 5], ids=["alone", "padded"])
@pytest.mark.parametrize("window", [2, 60, 120], ids=["of-a-token", "full", "filled-on-the-way"])
def test_windows_of_layers_beside(window, padding, tiny_model, monkeypatch, prompts, generate):
    model, inputs = tiny_model("gemma3-hybrid", sliding_window=window), prompts(2 if padding else 1, 97, padding)
    # So many bits that no code that falls the other way is seen
    expected, cache = (GEARCache(model, backbone="transform", nbits=8, residual_length=20) for _ in range(2))
    tokens = generate(model, expected, inputs, 50)
    run_step = RecordedStep.__call__

    def run_twice(self, *arguments):
        # As on a GPU before it is captured, where nothing but the last place may be written
        self._run()
        return run_step(self, *arguments)

    monkeypatch.setattr(RecordedStep, "__call__", run_twice)
    with cache.captured_steps(model) as steps:
        assert torch.equal(generate(model, cache, inputs, 50), tokens)
        check_layers(cache, expected)
        copied = copy.deepcopy(cache)
    # The prompt, and two chunks
    assert (steps.num_recorded, steps.num_others, steps.num_replayed) == (1, 3, 47)
    for each in (cache, copied):
        check_layers(each, expected)
    with torch.no_grad():
        logits = [model(**next_token(tokens, padding), past_key_values=each).logits for each in (cache, expected)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)


def next_token(tokens, padding):
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens[:, -1:], "attention_mask": mask, "position_ids": mask.sum(dim=1)[:, None] - 1}


def states(layer, side):
    return layer.materialize(side) if isinstance(layer, TransformLayer) else getattr(layer, side)


def check_layers(cache, expected):
    assert len({layer.get_seq_length() for each in (cache, expected) for layer in each.layers}) == 1
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        for side in ("keys", "values"):
            pair = (
                each.materialize(side) if hasattr(each, "blocks") else getattr(each, side) for each in (mine, theirs)
            )
            torch.testing.assert_close(*pair, rtol=0, atol=1e-3)


def test_windows_that_cannot_be_are_named(tiny_model):
    hybrid, mistral = (tiny_model(name, sliding_window=600) for name in ("gemma3-hybrid", "mistral-sliding"))
    cases = (
        # A step within a window would be replayed beyond it
        (hybrid, GEARCache(), r"layer 0: make the cache with `GEARCache\(model\)`, or decode outside of it"),
        (hybrid, GEARCache(hybrid, sliding="compressed"), 'layer 0: make the cache with `sliding="dense"`, or decode'),
        (mistral, GEARCache(mistral, sliding="compressed"), 'layer 0: make the cache with `sliding="dense"`, or'),
        (mistral, GEARCache(mistral, sliding="dense"), "is for caches that compress layers of the model"),
    )
    for model, cache, message in cases:
        with pytest.raises(ValueError, match=message), cache.captured_steps(model):
            pass
        assert "forward" not in vars(model)


@pytest.mark.parametrize("window", [30, 120])
def test_guesses_beside_windows(window, tiny_model, prompts):
    model, ids = tiny_model("gemma3-hybrid", sliding_window=window), prompts(1, 20)["input_ids"].repeat(1, 5)
    options = {"max_new_tokens": 50, "do_sample": False, "prompt_lookup_num_tokens": 3, "eos_token_id": 1}
    try:
        model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    except ValueError as error:
        pytest.skip(f"this release of Transformers takes back no guesses beyond a window: {error}")
    tokens = model.generate(ids, past_key_values=GEARCache(model), **options)
    cache = GEARCache(model)
    with cache.captured_steps(model):
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), tokens)


@torch.no_grad()
def test_tokens_are_taken_back(tiny_model, prompts):
    model = tiny_model("gemma3-hybrid", sliding_window=150)
    expected, cache = (GEARCache(model, backbone="transform", nbits=8, residual_length=20) for _ in range(2))
    ids = prompts(1, 130)["input_ids"]

    def decode(each, tokens):
        return [model(token, past_key_values=each).logits for token in tokens.split(1, dim=1)]

    logits = []
    for each in (expected, cache):
        model(ids[:, :97], past_key_values=each)
        with cache.captured_steps(model) as steps:
            logits.append(decode(each, ids[:, 97:107]))
            # What is left lies where it lay, but for three places
            each.crop(-3)
            logits[-1] += decode(each, ids[:, 104:115])
    assert steps.num_recorded == 1 and steps.num_replayed == 21
    for ours, theirs in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
