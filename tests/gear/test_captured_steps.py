"""Steps that are recorded and replayed, where there are no graphs: tokens and contents are as they are without.

Kernels that read lengths on the device are tested in `tests/triton_kernels`, what a step asks of a GPU in
`test_recorded_step.py`.
"""

import copy
import functools

import pytest
import torch

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.gear.captured_steps import FixedBuffer
from kvcache_plugins.gear.transform.calibration import calibrate_transform


PRESETS = ["gear", "gear-t16", "gear-2bit", "kivi-2bit", "gear-k4v3"]


def prompts(batch_size, length, padding=0):
    """Ids, and a mask that hides the first tokens of the first sequence."""
    ids = torch.randint(3, 96, (batch_size, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, cache, inputs, num_tokens):
    return model.generate(**inputs, past_key_values=cache, max_new_tokens=num_tokens, do_sample=False)


def contents(cache):
    """What a cache holds, room aside."""
    tensors = [
        tensor for layer in cache.layers for part, tensor in layer.named_tensors() if part not in ("spare", "residual")
    ]
    return [*tensors, *(layer.materialize(side) for layer in cache.layers for side in ("keys", "values"))]


LONG = pytest.mark.long
CASES = [
    *(pytest.param(name, 1, 0, id=f"{name}-alone") for name in PRESETS),
    *(pytest.param(name, 2, 5, id=f"{name}-padded", marks=[] if name == "gear" else LONG) for name in PRESETS),
]


def replayed(model, make_cache, inputs, num_tokens):
    """Generates with a cache, and the same tokens with one whose steps are captured: both caches, and the steps."""
    expected, cache = make_cache(), make_cache()
    tokens = generate(model, expected, inputs, num_tokens)
    with cache.captured_steps(model, num_tokens) as steps:
        assert torch.equal(generate(model, cache, inputs, num_tokens), tokens)
    assert steps.num_recorded == 1
    return expected, cache, steps


@pytest.mark.parametrize(("name", "batch_size", "padding"), CASES)
def test_tokens_are_those_of_the_cache(name, batch_size, padding, tiny_llama):
    num_tokens = 45 if name == "gear" else 70
    make_cache = functools.partial(create_cache, name, tiny_llama)
    expected, cache, steps = replayed(tiny_llama, make_cache, prompts(batch_size, 97, padding), num_tokens)
    # The prompt, and the steps before which a chunk was compressed
    packing = cache.layers[0].packing
    num_others = 2 + (num_tokens - 2 - packing.residual_length) // (packing.residual_length - packing.num_kept)
    assert steps.num_others == num_others
    assert steps.num_replayed == num_tokens - num_others
    assert cache.stats() == expected.stats()
    for mine, theirs in zip(contents(cache), contents(expected), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=1e-3)


@pytest.mark.long
def test_in_calibrated_bases(tiny_llama, random_windows):
    calibration = calibrate_transform(tiny_llama, random_windows(1, 200), num_draws=1)
    make_cache = functools.partial(create_cache, "gear-c16", tiny_llama, calibration=calibration)
    assert replayed(tiny_llama, make_cache, prompts(1, 97), 30)[2].num_replayed > 20


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "llama-mqa"])
def test_other_models(architecture, tiny_model):
    model = tiny_model(architecture)
    assert replayed(model, functools.partial(GEARCache, model), prompts(1, 97), 50)[2].num_replayed > 40


def test_guesses_that_are_taken_back(tiny_llama):
    ids = prompts(1, 20)["input_ids"].repeat(1, 5)
    # Older releases of Transformers look for an end among what they propose
    options = {"max_new_tokens": 60, "do_sample": False, "prompt_lookup_num_tokens": 3, "eos_token_id": 1}
    tokens = tiny_llama.generate(ids, past_key_values=GEARCache(tiny_llama), **options)
    cache = GEARCache(tiny_llama)
    with cache.captured_steps(tiny_llama) as steps:
        assert torch.equal(tiny_llama.generate(ids, past_key_values=cache, **options), tokens)
    assert steps.num_recorded == 1 and min(steps.num_replayed, steps.num_others) > 3


@torch.no_grad()
def decode(model, cache, ids, num_tokens):
    """Tokens after the last one, which the cache does not hold yet."""
    tokens = []
    for _ in range(num_tokens):
        ids = model(input_ids=ids[:, -1:], past_key_values=cache).logits[:, -1:].argmax(dim=-1)
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


@torch.no_grad()
def read(model, cache, inputs):
    return model(**inputs, past_key_values=cache).logits[:, -1:].argmax(dim=-1)


@pytest.mark.parametrize("name", ["gear", "gear-2bit"])
def test_leaving_gives_an_ordinary_cache_with_the_same_contents(name, tiny_llama, tmp_path):
    cache = create_cache(name, tiny_llama)
    first = read(tiny_llama, cache, prompts(1, 97))
    with pytest.raises(RuntimeError, match="by the user"), cache.captured_steps(tiny_llama):
        decode(tiny_llama, cache, first, 70)
        assert all(isinstance(layer.buffer, FixedBuffer) for layer in cache.layers)
        inside, room = contents(cache), cache.memory().total_bytes
        cache.save(tmp_path / "inside", tiny_llama)
        copied = copy.deepcopy(cache)
        raise RuntimeError("by the user")
    assert "forward" not in vars(tiny_llama)
    assert not any(isinstance(layer.buffer, FixedBuffer) for each in (cache, copied) for layer in each.layers)
    assert cache.memory().total_bytes < room
    others = [cache, copied, GEARCache.load(tmp_path / "inside", tiny_llama)]
    for other in others:
        for mine, theirs in zip(contents(other), inside, strict=True):
            assert torch.equal(mine, theirs)
    tokens = [decode(tiny_llama, other, first, 30) for other in others]
    assert all(torch.equal(each, tokens[0]) for each in tokens)


def test_what_grows_and_shrinks_is_recorded_anew(tiny_llama):
    expected, cache = (GEARCache(tiny_llama.config, nbits=2, residual_length=8, q_group_size=8) for _ in range(2))
    first = read(tiny_llama, expected, prompts(1, 97))
    assert torch.equal(read(tiny_llama, cache, prompts(1, 97)), first)
    ordinary, replayed = [], []
    with cache.captured_steps(tiny_llama, 16) as steps:
        for each, tokens in ((expected, ordinary), (cache, replayed)):
            # More than there is room for, and then into a chunk that has been compressed
            tokens.append(decode(tiny_llama, each, first, 21))
            each.crop(-11)
            tokens.append(decode(tiny_llama, each, tokens[-1], 9))
            with torch.no_grad():
                # Another prompt, a few tokens at once, and all of it again
                tokens.append(
                    tiny_llama(**{"input_ids": prompts(1, 41)["input_ids"]}, past_key_values=each).logits.argmax(-1)
                )
                tokens.append(tiny_llama(prompts(1, 3)["input_ids"], past_key_values=each).logits.argmax(-1))
            tokens.append(decode(tiny_llama, each, tokens[-1], 9))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(replayed, ordinary, strict=True))
    assert 3 <= steps.num_recorded <= 5
    assert cache.stats() == expected.stats()


def test_generate_is_not_told_to_compile_or_to_make_masks(tiny_llama):
    cache, seen = GEARCache(tiny_llama.config), []
    with cache.captured_steps(tiny_llama), pytest.MonkeyPatch.context() as patch:
        forward = tiny_llama.forward

        @functools.wraps(forward)
        def seeing(*args, **kwargs):
            seen.append((cache.is_compileable, kwargs["attention_mask"].dim()))
            return forward(*args, **kwargs)

        patch.setattr(tiny_llama, "forward", seeing)
        generate(tiny_llama, cache, prompts(2, 97, 5), 4)
    assert seen == 4 * [(False, 2)]


def test_outputs_stay_as_they_are(tiny_llama):
    cache = GEARCache(tiny_llama.config)
    first = read(tiny_llama, cache, prompts(1, 97))
    with torch.no_grad(), cache.captured_steps(tiny_llama):
        outputs = tiny_llama(first, past_key_values=cache, output_hidden_states=True)
        kept = outputs.logits.clone()
        tiny_llama(input_ids=first, past_key_values=cache, output_hidden_states=True)
    assert torch.equal(outputs.logits, kept) and len(outputs.hidden_states) == 3
    assert outputs.past_key_values is cache


def test_another_mask_is_not_ignored(tiny_llama):
    expected, cache = (GEARCache(tiny_llama.config) for _ in range(2))
    first = read(tiny_llama, expected, prompts(1, 97))
    read(tiny_llama, cache, prompts(1, 97))
    mask = torch.ones(1, 98, dtype=torch.long)
    mask[:, 20:40] = 0
    with torch.no_grad():
        logits = tiny_llama(first, attention_mask=mask, past_key_values=expected).logits
        with cache.captured_steps(tiny_llama) as steps:
            assert torch.equal(tiny_llama(first, attention_mask=mask, past_key_values=cache).logits, logits)
    assert (steps.num_replayed, steps.num_others) == (0, 1)


def read_with_masks(model, cache, inputs, hidden, num_tokens):
    """Decodes with masks of its own, the ninth of which on hide tokens `hidden` too, or nothing any more."""
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    with torch.no_grad():
        for step in range(num_tokens):
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            call = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
            ids = model(**call, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            if step == 8:
                mask[:, hidden] = hidden.start == 0


@pytest.mark.parametrize(
    ("padding", "hidden"),
    [(0, slice(50, 52)), (0, slice(105, 106)), (5, slice(50, 51)), (5, slice(0, 5))],
    ids=["prompt", "decoded", "beside-padding", "padding-shown"],
)
@pytest.mark.parametrize("num_tokens", [12, 40], ids=["at-the-end", "at-the-next-chunk"])
def test_a_mask_that_changes_later_is_refused(padding, hidden, num_tokens, tiny_llama):
    cache = create_cache("gear", tiny_llama)
    steps = cache.captured_steps(tiny_llama)
    with pytest.raises(ValueError, match="`attention_mask` hides other tokens than the padding"), steps:
        read_with_masks(tiny_llama, cache, prompts(2, 97, padding), hidden, num_tokens)
    # Its chunk is of 20 tokens
    assert steps.num_recorded == 1 and steps.num_replayed == min(num_tokens - 1, 20)
    assert "forward" not in vars(tiny_llama)


def test_short_prompts_wait_until_something_is_compressed(tiny_llama):
    *_, steps = replayed(tiny_llama, functools.partial(create_cache, "gear", tiny_llama), prompts(1, 9), 75)
    assert 0 < steps.num_replayed < 45


def test_beam_search_is_refused(tiny_llama):
    cache = GEARCache(tiny_llama.config)
    with pytest.raises(ValueError, match="beam search"), cache.captured_steps(tiny_llama):
        tiny_llama.generate(**prompts(1, 97), past_key_values=cache, max_new_tokens=20, num_beams=2, do_sample=False)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("llama", {"attn_implementation": "eager"}, "models whose attention is `eager`"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "rotary embedding goes by the length",
        ),
    ],
)
def test_what_cannot_be_captured_is_named(architecture, fields, message, tiny_model):
    model = tiny_model(architecture, **fields)
    cache = GEARCache(model.config)
    with pytest.raises(ValueError, match=f"`captured_steps` is not for .*{message}"), cache.captured_steps(model):
        pass
    assert "forward" not in vars(model)


@pytest.mark.parametrize("num_tokens", [0, -1, 1.5, True])
def test_wrong_room_is_refused(num_tokens, tiny_llama):
    with pytest.raises(ValueError, match="`num_tokens` has to be an integer of at least 1"):
        GEARCache(tiny_llama.config).captured_steps(tiny_llama, num_tokens)
