"""`reuse`: a cache continues from the beginning that it shares with an edited conversation."""

import copy
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcache_plugins import create_cache
from kvcache_plugins.custom_generate import attached
from kvcache_plugins.eval.tiny_models import build_family


CACHES = ["transform", "gear-2bit", "kivi-2bit", "turboquant-4bit", "infinigen", "h2o"]


@contextmanager
def counting(model):
    """Count the tokens that a model embeds."""
    counted = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: counted.append(args[0].shape[1])
    )
    try:
        yield counted
    finally:
        hook.remove()


def generate(model, ids, cache, num_new=8, **options):
    return model.generate(ids, past_key_values=cache, max_new_tokens=num_new, do_sample=False, **options)


def random_ids(*lengths):
    return [torch.randint(3, 97, (1, length)) for length in lengths]


# Edits that an agent makes to a prompt A and an answer B, and the tokens that remain in front of new tokens N
EDITS = {
    "tool result appended": lambda a, b, n: ([a, b, n], a.shape[1] + b.shape[1] - 1),
    "think block removed": lambda a, b, n: ([a, b[:, 4:], n], a.shape[1]),
    "turn rewritten": lambda a, b, n: ([a[:, :-30], n], a.shape[1] - 30),
    "answer asked again": lambda a, b, n: ([a], a.shape[1] - 1),
    "other conversation": lambda a, b, n: ([n], 0),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_reused_cache_reads_new_tokens_alone_and_equals_a_fresh_one(smollm2, edit):
    model, tokenizer = smollm2
    text = "The user asks for a licence. " * 20 + "Numbers count one, two, three, four, five, six, seven,"
    prompt = tokenizer(text, return_tensors="pt").input_ids
    new = tokenizer(" Tool result: 42. The capital of France is", return_tensors="pt").input_ids
    cache = create_cache("transform", model)
    output = generate(model, prompt, cache, 12)
    pieces, num_shared = edit(prompt, output[:, prompt.shape[1] :], new)
    edited = torch.cat(pieces, dim=1)
    assert cache.reuse(edited, output) == cache.get_seq_length() == num_shared
    with counting(model) as counted:
        continued = generate(model, edited, cache)
    assert counted[0] == edited.shape[1] - num_shared and counted[1:] == [1] * 7
    assert torch.equal(continued, generate(model, edited, create_cache("transform", model)))


@pytest.mark.parametrize("name", ["transform", "gear-2bit", "kivi-2bit", "turboquant-4bit"])
def test_logits_equal_a_fresh_cache_if_nothing_is_packed(tiny_llama, name):
    # A cache differs from a fresh one by packed tokens alone, and these are too few to be packed
    prompt, new = random_ids(7, 5)
    cache = create_cache(name, tiny_llama)
    output = generate(tiny_llama, prompt, cache, 4)
    edited = torch.cat([output[:, :5], new], dim=1)
    assert cache.reuse(edited, output) == 5
    fresh = create_cache(name, tiny_llama)
    with torch.no_grad():
        tiny_llama(edited[:, :5], past_key_values=fresh)
        logits, expected = (tiny_llama(edited[:, 5:], past_key_values=each).logits for each in (cache, fresh))
    torch.testing.assert_close(logits, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("num_kept", [1, 63, 64, 65, 128, 199])
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_continues_from_a_crop(tiny_llama, name, num_kept):
    prompt, new = random_ids(200, 10)
    edited = torch.cat([prompt[:, :num_kept], new], dim=1)
    logits = []
    for is_reused in (True, False):
        cache = create_cache(name, tiny_llama)
        with attached(cache), torch.no_grad():
            output = generate(tiny_llama, prompt, cache, 3)
            if is_reused:
                assert cache.reuse(edited, output) == num_kept
            else:
                cache.crop(num_kept - cache.get_seq_length())
            logits.append(tiny_llama(edited[:, cache.get_seq_length() :], past_key_values=cache).logits)
    torch.testing.assert_close(*logits)


def test_sequences_of_a_batch_share_the_shortest_beginning(tiny_llama):
    held = torch.cat(random_ids(90, 90, 90))
    cache = create_cache("transform", tiny_llama)
    output = generate(tiny_llama, held, cache)
    edited = torch.cat([output, torch.cat(random_ids(6, 6, 6))], dim=1)
    edited[1, 70] = 99
    assert cache.reuse(edited, output) == 70
    assert generate(tiny_llama, edited, cache).shape[1] == edited.shape[1] + 8


def test_padding_is_compared_by_the_mask(tiny_llama):
    ids = torch.cat(random_ids(80, 80))
    mask = torch.ones_like(ids)
    # Padding has the id of a real token
    ids[1, :10], mask[1, :9] = 5, 0
    cache = create_cache("transform", tiny_llama)
    output = generate(tiny_llama, ids, cache, attention_mask=mask)
    longer = torch.nn.functional.pad(mask, (0, 8), value=1)
    fork, again = cache.fork(2)
    assert cache.reuse(output, output, longer) == 87
    longer[1, 9] = 0
    assert fork.reuse(output, output, longer) == 9
    # Without a mask padding is a token like others
    assert again.reuse(output, output) == 87


def test_inputs_that_are_no_conversation_are_refused(tiny_llama):
    (ids,) = random_ids(50)
    cache = create_cache("transform", tiny_llama)
    output = generate(tiny_llama, ids, cache)
    for given, held, message in (
        (output, output[:, :40], "`held_ids` has 40 tokens, but the cache holds 57"),
        (output[0], output, r"`input_ids` has to be token ids of shape .* got \[58\]"),
        (output.float(), output, "`input_ids` has to be token ids"),
        (output.repeat(2, 1), output, "`input_ids` has to hold tokens of 1 sequences"),
        (output[:, :0], output, "`input_ids` has to hold tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.reuse(given, held)
    with pytest.raises(ValueError, match="`attention_mask` has to be of the shape of `input_ids`"):
        cache.reuse(output, output, torch.ones(1, 3))
    assert cache.get_seq_length() == 57


@pytest.mark.parametrize("architecture", ["mistral-sliding", "gemma3-hybrid"])
@pytest.mark.parametrize("options", [{}, {"sliding": "dense"}, {"sliding": "compressed"}], ids=str)
def test_windows_crop_back_as_far_as_they_record(tiny_model, architecture, options):
    model = tiny_model(architecture)
    prompt, new = random_ids(90, 5)
    edited = torch.cat([prompt[:, :80], new], dim=1)
    is_kept = architecture == "mistral-sliding" and options != {"sliding": "compressed"}
    for records in (False, True):
        with pytest.warns(UserWarning, match="all layers") if is_kept else torch.no_grad():
            cache = create_cache("transform", model, **options)
        if records:
            # From the first token of a turn on, as tools do that may take it back
            generate(model, prompt[:, :60], cache, 1)
            cache.activate_past_recording()
        output = generate(model, prompt, cache)
        assert cache.reuse(edited, output) == (80 if records else 0) == cache.get_seq_length()
        with counting(model) as counted:
            continued = generate(model, edited, cache, 4)
        assert counted[0] == (5 if records else 85)
        if not records:
            with pytest.warns(UserWarning, match="all layers") if is_kept else torch.no_grad():
                fresh = create_cache("transform", model, **options)
            assert torch.equal(continued, generate(model, edited, fresh, 4))
        # A text that only grows is continued all the same
        longer = torch.cat([continued, new], dim=1)
        assert cache.reuse(longer, continued) == continued.shape[1] - 1


@pytest.mark.parametrize("kind", ["window", "convolution"])
def test_states_that_began_to_be_recorded_go_back_to_that_token_alone(tiny_model, kind):
    model = tiny_model("gemma3-hybrid") if kind == "window" else build_family("lfm2_moe")
    prompt, new = random_ids(65, 5)
    cache, plain = create_cache("transform", model), create_cache("transform", model)
    with torch.no_grad():
        for each in (cache, plain):
            model(prompt[:, :60], past_key_values=each)
        cache.activate_past_recording()
        model(prompt[:, 60:], past_key_values=cache)
        for num_shared, num_kept in ((59, 0), (60, 60)):
            edited = torch.cat([prompt[:, :num_shared], new], dim=1)
            copied = copy.deepcopy(cache)
            assert copied.reuse(edited, prompt) == num_kept == copied.get_seq_length()
        logits, expected = (model(new, past_key_values=each).logits for each in (copied, plain))
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_recurrent_layers_restart_and_forks_crop_back(kind):
    fields = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}
    if kind == "qwen3_5_text":
        fields["layer_types"] = ["linear_attention", "full_attention"] * 2
        fields |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        fields |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    elif kind == "lfm2":
        fields["layer_types"] = ["conv", "full_attention"] * 2
    else:
        fields |= {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields)).eval()
    prompt, new = random_ids(90, 5)
    edited = torch.cat([prompt, new], dim=1)
    cache = create_cache("transform", model)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    (turn,) = cache.fork(1)
    output = generate(model, torch.cat([prompt, new + 1], dim=1) % 97, cache)
    assert cache.reuse(edited, output) == 0 == cache.get_seq_length()
    assert torch.equal(generate(model, edited, cache), generate(model, edited, create_cache("transform", model)))
    # A fork of the turn's end holds its tokens
    assert turn.reuse(edited, output) == 90
    with counting(model) as counted:
        generate(model, edited, turn, 1)
    assert counted == [5]
    # Convolutions alone can go back over what they record
    if kind == "lfm2":
        cache = create_cache("transform", model)
        cache.activate_past_recording()
        output = generate(model, prompt, cache)
        assert cache.reuse(torch.cat([output[:, :85], new], dim=1), output) == 85


def test_a_full_dense_window_refuses_a_crop_before_any_layer_changes(tiny_model):
    model, ids = tiny_model("gemma3-hybrid"), random_ids(90)[0]
    cache = create_cache("transform", model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(ValueError, match="`crop`: layer . has a full sliding window, whose past is recorded only"):
        cache.crop(-2)
    assert {layer.get_seq_length() for layer in cache.layers} == {90}
