"""Models of attention beside convolutions and recurrences: packed tokens and exact states go together everywhere.

`KINDS` has a family of each kind; those and caches that are not in `DAILY` are `long`.
"""

import copy
import dataclasses

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import PromptStore, create_cache
from kvcache_plugins.eval.families import generate
from kvcache_plugins.eval.tiny_models import build_family, prompt
from kvcache_plugins.files.records import read_record, write_record
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.models.cache_argument import as_argument, reading_options
from kvcache_plugins.packed.warm_up import Sizes, warm_up


# Recurrences between layers of attention, in the same layer, and convolutions alone
KINDS = ["qwen3_next", "zamba2", "lfm2_moe"]
OTHERS = [
    *("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lara_mini"),
    *("lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "zamba", "zaya"),
]
CONVOLUTIONS_ALONE = {"lfm2_moe", "lfm3", "inkling_text"}
# The dense cache itself does not continue these by several tokens as one by one
ONE_BY_ONE = {"jamba"}
# The dense cache itself does not continue these after `activate_past_recording`
WITHOUT_PAST = {"zaya"}
# Several tokens are packed later than one by one: with these bits, that changes no expert of a token
FINE = {"transform": {"key_nbits": 8, "value_nbits": 8}}
NAMES = ["transform", "gear", "kivi-2bit"]
LENGTH, NUM_DECODED = 150, 40
DAILY = {("qwen3_next", "transform"), ("qwen3_next", "gear"), ("zamba2", "kivi-2bit"), ("lfm2_moe", "transform")}
CASES = [
    pytest.param(family, name, marks=() if (family, name) in DAILY else pytest.mark.long)
    for family in KINDS + OTHERS
    for name in NAMES
]
of_each = pytest.mark.parametrize(("family", "name"), CASES)


@torch.no_grad()
def read(model: PreTrainedModel, cache, ids: torch.Tensor, stop: int | None = None) -> torch.Tensor:
    """Read the tokens before `stop` that a cache does not hold."""
    return model(**reading_options(model.forward, cache, ids, None, stop or ids.shape[1])).logits


def decode(model: PreTrainedModel, cache, ids: torch.Tensor) -> torch.Tensor:
    """Read tokens one by one."""
    return torch.cat(
        [read(model, cache, ids, stop) for stop in range(cache.get_seq_length() + 1, ids.shape[1] + 1)], 1
    )


def filled(family: str, name: str, **options: int):
    """A model, a cache with a prompt and decoded tokens, these tokens, and further ones."""
    model = build_family(family)
    cache = create_cache(name, model, **options)
    ids = prompt(model, LENGTH + NUM_DECODED + 9, 1)
    held = ids[:, : LENGTH + NUM_DECODED]
    read(model, cache, held, LENGTH)
    decode(model, cache, held)
    return model, cache, held, ids


def distance(logits: torch.Tensor, others: torch.Tensor) -> float:
    return float((logits - others).abs().max() / others.std())


@of_each
def test_a_loaded_file_continues_as_the_cache_did(tmp_path, family, name):
    model, cache, _, ids = filled(family, name)
    path, again = tmp_path / "one", tmp_path / "two"
    cache.save(path, model)
    loaded = type(cache).load(path, model)
    loaded.save(again, model)
    assert path.read_bytes() == again.read_bytes()
    assert torch.equal(decode(model, loaded, ids), decode(model, cache, ids))


@of_each
def test_copies_and_forks_continue_independently(family, name):
    model, cache, held, ids = filled(family, name)
    copies, forks = [copy.deepcopy(cache) for _ in range(2)], cache.fork(2)
    for one, _ in (copies, forks):
        read(model, one, torch.cat([held, prompt(model, 9, 7)], dim=1))
    logits = decode(model, cache, ids)
    for _, other in (copies, forks):
        assert distance(decode(model, other, ids), logits) < 1e-4


@of_each
def test_a_store_equals_reading_in_blocks(tmp_path, family, name):
    model = build_family(family)
    ids = prompt(model, 300, 1)
    PromptStore(tmp_path, block_tokens=64).read(model, ids, name)
    for num_shared in (300, 140):
        mixed = torch.cat([ids[:, :num_shared], prompt(model, 306 - num_shared, 8)], dim=1)
        store = PromptStore(tmp_path, block_tokens=64)
        cache = store.read(model, mixed[:, :300], name)
        length = cache.record.length
        assert store.stats()["tokens_saved"] == num_shared // length * length
        plain = create_cache(name, model, **({"sliding": "dense"} if name == "transform" else {}))
        for stop in [*range(length, 300, length), 300]:
            read(model, plain, mixed, stop)
        assert torch.equal(decode(model, cache, mixed), decode(model, plain, mixed))


@of_each
def test_states_after_chunks_of_generate_are_stored(tmp_path, family, name):
    model = build_family(family)
    ids, runs = prompt(model, 300, 1), []
    for num_saved in (0, 1):
        store = PromptStore(tmp_path, block_tokens=64)
        cache = store.cache_for(model, ids, name)
        length = cache.record.length
        assert store.stats()["tokens_saved"] == num_saved * (299 // length * length)
        run = generate(model, cache, ids, None, 4, None, length)
        assert store.keep(cache, ids) == (1 - num_saved) * (300 // length)
        runs.append(run)
    first, again = runs
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.logits, again.logits)
    # Every block has the states of its own end, which later forwards wrote over
    mixed = torch.cat([ids[:, :140], prompt(model, 20, 8)], dim=1)
    cache = PromptStore(tmp_path, block_tokens=64).cache_for(model, mixed, name)
    assert cache.get_seq_length() == 140 // length * length
    plain = create_cache(name, model, **({"sliding": "dense"} if name == "transform" else {}))
    for stop in range(length, 141, length):
        read(model, plain, mixed, stop)
    assert torch.equal(decode(model, cache, mixed), decode(model, plain, mixed))


@of_each
def test_padded_batches_equal_sequences_alone(family, name):
    model = build_family(family)
    long, short, num_padding = prompt(model, LENGTH, 1), prompt(model, LENGTH - 30, 2), 30
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :num_padding] = 0
    pair = torch.cat([long, torch.cat([long.new_zeros(1, num_padding), short], dim=1)])
    both = generate(model, create_cache(name, model), pair, mask, 5, None)
    for row, ids in enumerate((long, short)):
        alone = generate(model, create_cache(name, model), ids, None, 5, both.tokens[row : row + 1])
        # Rounding may turn a code over
        assert distance(alone.logits, both.logits[row : row + 1]) < 0.05


@of_each
def test_several_tokens_and_generate_equal_single_tokens(family, name):
    model, cache, held, ids = filled(family, name, **FINE.get(name, {}))
    if family not in ONE_BY_ONE:
        several = read(model, copy.deepcopy(cache), ids)
        assert distance(several, decode(model, copy.deepcopy(cache), ids)) < 0.05
    whole = torch.cat([held, prompt(model, 1, 9)], dim=1)
    run = generate(model, copy.deepcopy(cache), whole, None, 5, None)
    logits = decode(model, cache, torch.cat([whole, run.tokens[:, :-1]], dim=1))
    assert distance(run.logits, logits) < 0.05


@of_each
def test_crop_restores_states_or_is_refused_unchanged(family, name):
    model, cache, held, ids = filled(family, name)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"^`crop`: layer \d has (states of a recurrence|a convolution, whose past)"):
        cache.crop(-2)
    if family in WITHOUT_PAST:
        return
    cache.activate_past_recording()
    before = copy.deepcopy(cache)
    longer = torch.cat([held, prompt(model, 3, 7)], dim=1)
    read(model, cache, longer)
    if family in CONVOLUTIONS_ALONE:
        cache.crop(-3)
        assert distance(decode(model, cache, ids), decode(model, before, ids)) < 0.05
        return
    after = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"^`crop`: layer \d has states of a recurrence"):
        cache.crop(-3)
    more = torch.cat([longer, prompt(model, 4, 8)], dim=1)
    assert torch.equal(decode(model, cache, more), decode(model, after, more))


@of_each
def test_sequences_are_repeated_and_selected_with_their_states(family, name):
    model = build_family(family)
    pair = torch.cat([prompt(model, LENGTH, 1), prompt(model, LENGTH, 2)])
    more = prompt(model, 4, 3).expand(2, -1)
    own, other = create_cache(name, model), create_cache(name, model)
    read(model, own, pair)
    own.batch_select_indices(torch.tensor([1]))
    own.batch_repeat_interleave(2)
    rows = pair[1:].expand(2, -1)
    read(model, other, rows)
    ids = torch.cat([rows, more], dim=1)
    assert distance(decode(model, own, ids), decode(model, other, ids)) < 0.05
    own.reset()
    fresh = create_cache(name, model)
    assert distance(read(model, own, pair), read(model, fresh, pair)) < 1e-4


def test_a_refused_prompt_leaves_no_state_behind() -> None:
    model = build_family("qwen3_next")
    cache = create_cache("transform", model)
    cache.expected_heads = frozenset({7})
    with pytest.raises(ValueError, match="key/value heads"):
        read(model, cache, prompt(model, 100, 2))
    cache.expected_heads = frozenset()
    ids = prompt(model, LENGTH, 1)
    assert torch.equal(read(model, cache, ids), read(model, create_cache("transform", model), ids))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda states: None, "if, and only if, the cache holds tokens"),
        (lambda states: states[:3], "holds 3 layers, but the model has 4"),
        (lambda states: [None, states[0], *states[2:]], "if, and only if, the cache holds tokens"),
        (
            lambda states: [states[0], states[0], *states[2:]],
            "`recurrent.1` has states, but the layer has no",
        ),
        (lambda states: [replaced(states[0], "7"), *states[1:]], "convolutions.7` is unknown"),
        (lambda states: [replaced(states[0], "0", rows=2), *states[1:]], "has to be of floats for 1 sequences"),
    ],
    ids=["none", "few", "moved", "of-attention", "unknown", "batch"],
)
def test_forged_states_are_refused(tmp_path, harm, reason):
    model, cache, _, _ = filled("qwen3_next", "kivi-2bit")
    path = tmp_path / "cache"
    cache.save(path, model)
    record = read_record(path, cache._format, cache._snapshot_class)
    write_record(path, cache._format, dataclasses.replace(record, recurrent=harm(record.recurrent)))
    with pytest.raises(ValueError, match=reason):
        type(cache).load(path, model)


def replaced(state, number: str, rows: int = 1):
    (tensor,) = state.convolutions.values()
    return dataclasses.replace(state, convolutions={number: tensor.expand(rows, *tensor.shape[1:])})


def test_states_in_the_model_are_refused(tmp_path):
    model = build_family("recurrent_gemma")
    cache = create_cache("kivi-2bit", model)
    read(model, cache, prompt(model, 60, 1))
    with pytest.raises(ValueError, match="layer 0 has a recurrence whose states the model keeps in its own modules"):
        cache.save(tmp_path / "cache", model)


def test_a_file_loaded_in_inference_mode_continues_in_any(tmp_path):
    model, cache, _, ids = filled("zamba2", "transform")
    cache.save(tmp_path / "cache", model)
    with torch.inference_mode():
        loaded = type(cache).load(tmp_path / "cache", model)
    assert torch.equal(decode(model, loaded, ids), decode(model, cache, ids))


@pytest.mark.parametrize("length", [2, LENGTH])
def test_a_file_saved_while_the_past_is_recorded_holds_the_newest_states(tmp_path, length):
    model = build_family("lfm2_moe")
    ids = prompt(model, length + 9, 1)
    # Recorded convolutions of 2 tokens are shorter than the kernel, those of more are longer
    cache, plain = create_cache("transform", model), create_cache("transform", model)
    cache.activate_past_recording()
    for each in (cache, plain):
        read(model, each, ids, length)
    cache.save(tmp_path / "cache", model)
    loaded = type(cache).load(tmp_path / "cache", model)
    assert torch.equal(decode(model, loaded, ids), decode(model, plain, ids))


def test_kernels_of_hybrid_layers_are_compiled_ahead() -> None:
    model = build_family("falcon_h1")
    layer = create_cache("transform", model).layers[0]
    assert type(layer) is not RowLayer and isinstance(layer, RowLayer)
    warm_up([layer], Sizes(2, 4, 24, 24, torch.float32, torch.device("cpu"), is_padded=True))


def test_dense_caches_still_lack_crop_and_batch_operations() -> None:
    """Fails when Transformers can: then `crop` and a batch's operations need not differ from its own."""
    model = build_family("qwen3_next")
    cache = DynamicCache(config=model.config)
    model(prompt(model, 9, 1), **as_argument(cache))
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)
    with pytest.raises(AttributeError, match="batch_repeat_interleave"):
        cache.batch_repeat_interleave(2)
