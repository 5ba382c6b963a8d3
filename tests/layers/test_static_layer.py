"""Static layers: storage of any other layer with reserved capacity, and steps as one graph that is compiled once."""

import copy
import gc

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache
from transformers.generation import CompileConfig

from kvcache_plugins import TransformCodingCache, create_cache
from kvcache_plugins.layers.static_layer import StaticLayer, static_attention
from kvcache_plugins.layers.static_row_layer import StaticRowLayer
from kvcache_plugins.models.cache_argument import as_argument


MOST = 300
# Tails that are packed often, and few recent rows
OPTIONS = {"max_cache_len": MOST, "residual_length": 5, "recent_length": 12}


def prompts(batch_size, length, padding=0):
    """Ids, and a mask that hides the first tokens of the first sequence."""
    ids = torch.randint(3, 96, (batch_size, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@torch.no_grad()
def read(model, cache, ids):
    """The most likely next token."""
    return model(input_ids=ids, **as_argument(cache)).logits[:, -1:].argmax(dim=-1)


def decode(model, cache, ids, num_tokens):
    tokens = []
    for _ in range(num_tokens):
        ids = read(model, cache, ids[:, -1:])
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


def stored(cache):
    """Rows in use and exact tokens of all layers."""
    for layer in cache.layers:
        for segment in layer.storage.segments:
            if segment.length:
                yield from (rows[:, :, : segment.length] for rows in (segment.keys, segment.values))
        tail = layer.storage.tail
        if tail is not None and tail.length:
            yield from (tail.keys, tail.values)


def require_same_storage(cache, other):
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(stored(cache), stored(other), strict=True))
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length() and mine.exact_start == theirs.exact_start


def fill(cache, states, *counts):
    """Give a cache of one layer the first tokens of `states`, some at a time, and return attention to them."""
    outputs = []
    for count in counts:
        first = cache.get_seq_length()
        keys, values = cache.update(*(each[:, :, first : first + count] for each in states), 0)
        query = torch.ones(1, 2, count, 16)
        outputs.append(torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=first == 0))
    return outputs


def make_states(count, seed=0):
    return torch.randn(2, 1, 2, count, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_cache(tiny_model):
    """A static cache of one layer of two heads of 16."""
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=2)

    def make(**options):
        return TransformCodingCache(model.config, **{**OPTIONS, **options})

    return make


@pytest.mark.parametrize("options", [{}, {"recent_length": 0}, {"residual_length": 1}, {"residual_length": 40}])
def test_bytes_equal_those_of_a_growing_layer(make_cache, options):
    """Compare bytes at every length, through a second prompt and a few tokens at once."""
    states, static, growing = make_states(250), make_cache(**options), make_cache(**options, max_cache_len=None)
    for count in (90, *[1] * 60, 7, 1, 1, 50, *[1] * 41):
        fill(static, states, count)
        fill(growing, states, count)
        require_same_storage(static, growing)
    for name in ("tokens_compressed", "chunks_compressed", "tokens_exact"):
        assert static.stats()[name] == growing.stats()[name]
    assert static.layers[0].is_compileable and not growing.layers[0].is_compileable


def test_cropped_tokens_leave_no_trace(make_cache):
    states, cache, expected = make_states(130), make_cache(), make_cache()
    fill(cache, states, 90, *[1] * 20)
    for count in (1, 3):
        fill(cache, torch.cat((states[..., :110, :], make_states(9, seed=1)), dim=3), *[count] * (3 // count))
        cache.crop(-3)
    fill(cache, states, *[1] * 20)
    fill(expected, states, 90, *[1] * 40)
    require_same_storage(cache, expected)


def test_rows_stay_in_place_within_capacity(make_cache):
    states, cache = make_states(190), make_cache(max_cache_len=120, recent_length=0)
    fill(cache, states, 90, 1)
    layer = cache.layers[0]
    graph, place = layer.graph, layer.storage.segments[0].keys.data_ptr()
    assert graph.num_columns == 120 and layer.get_mask_sizes(1) == (120, 0)
    fill(cache, states, *[1] * 10, 3, 1)
    assert layer.graph is graph and layer.storage.segments[0].keys.data_ptr() == place
    fill(cache, states, *[1] * 80)
    assert layer.graph is not graph and layer.graph.num_columns > 180
    expected = make_cache(recent_length=0)
    fill(expected, states, 90, *[1] * 11, 3, *[1] * 81)
    require_same_storage(cache, expected)


@pytest.mark.parametrize("length", [95, 100])
def test_masks_have_a_column_for_the_next_token(make_cache, length):
    """Also where the tokens held are as many as there is capacity for."""
    states, cache = make_states(120), make_cache(max_cache_len=100)
    for count in (length, *[1] * 20):
        fill(cache, states, count)
        num_columns, first = cache.layers[0].get_mask_sizes(1)
        assert num_columns > cache.get_seq_length() and first == 0


@torch.no_grad()
def test_forks_attend_to_shared_and_own_tokens(make_cache):
    """Long enough that recent rows are requantized into a segment of the fork's own, which is empty at first."""
    states, outputs, forks = make_states(150), [], []
    for options in ({}, {"max_cache_len": None}):
        cache = make_cache(**options)
        fill(cache, states, 90, 1)
        forks += cache.fork(1)
        outputs.append(fill(forks[-1], states, *[1] * 50))
    for static, growing in zip(*outputs, strict=True):
        assert torch.equal(static, growing)
    require_same_storage(*forks)


def test_masks_are_applied_to_every_part(tiny_llama):
    cache, dense = TransformCodingCache(tiny_llama, **OPTIONS), DynamicCache()
    ids = prompts(1, 100)["input_ids"]
    for each in (cache, dense):
        token = read(tiny_llama, each, ids)
    mask = torch.ones(1, 101, dtype=torch.long)
    mask[:, 20:90] = 0
    with torch.no_grad():
        logits, expected, unhidden = (
            tiny_llama(token, attention_mask=each_mask, **as_argument(each)).logits
            for each, each_mask in ((copy.deepcopy(cache), mask), (dense, mask), (cache, None))
        )
    assert (logits - expected).norm() < 0.2 * (unhidden - expected).norm()


def test_too_large_tokens_are_refused(make_cache):
    cache, states = make_cache(), make_states(200)
    states[:, :, :, 120] *= 1e9
    with pytest.raises(ValueError, match="layer 0: the keys to be compressed hold NaN or infinity, or numbers of"):
        fill(cache, states, 90, *[1] * 110)


def test_a_static_cache_serves_eager_steps_at_any_time(tiny_llama, tmp_path):
    cache = TransformCodingCache(tiny_llama, **OPTIONS)
    first = read(tiny_llama, cache, prompts(2, 97)["input_ids"])
    decode(tiny_llama, cache, first, 30)
    cache.save(tmp_path / "cache", tiny_llama)
    others = [copy.deepcopy(cache), TransformCodingCache.load(tmp_path / "cache", tiny_llama), *cache.fork(1)]
    for other in others:
        require_same_storage(other, cache)
    tokens = [decode(tiny_llama, each, first, 12) for each in (cache, others[0], others[2])]
    assert all(torch.equal(each, tokens[0]) for each in tokens)
    assert cache.memory().total_bytes > others[1].memory().total_bytes
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(*decode(tiny_llama, cache, first[[1, 1]], 12))
    cache.reset()
    assert torch.equal(read(tiny_llama, cache, prompts(2, 97)["input_ids"]), first)


def test_a_layer_that_was_loaded_for_a_config_is_static_once_it_is_on_a_gpu(make_cache, monkeypatch):
    monkeypatch.setattr("kvcache_plugins.transform_coding.cache.has_gpu_kernels", lambda: True)
    cache = make_cache(max_cache_len=None)
    fill(cache, make_states(90), 90)
    layer = cache.layers[0]
    assert isinstance(layer, StaticRowLayer) and not layer._is_static
    # The device `meta` stands for a GPU
    monkeypatch.setattr(f"{StaticLayer.__module__}.compiles_kernels", lambda states: states.device.type == "meta")
    monkeypatch.setattr(f"{StaticLayer.__module__}.load_triton", lambda: None)
    monkeypatch.setattr(StaticRowLayer, "_explain_packing", lambda self, triton: None)
    layer._move_to(torch.device("meta"))
    assert layer._is_static


def test_short_prompts_wait_until_something_is_coded(tiny_llama):
    cache = TransformCodingCache(tiny_llama, **OPTIONS)
    decode(tiny_llama, cache, read(tiny_llama, cache, prompts(1, 9)["input_ids"]), 50)
    assert cache.layers[0].graph is None
    decode(tiny_llama, cache, torch.ones(1, 1, dtype=torch.long), 30)
    assert cache.layers[0].graph is not None and cache.stats()["dense_reads"] == 0


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        *(("llama", {"max_cache_len": number}, "an integer of at least 1") for number in (0, 1.5, True)),
        ("gemma3-hybrid", {}, "full attention"),
        (None, {}, "model or its config"),
    ],
)
def test_models_without_static_steps_are_refused(architecture, options, message, tiny_model):
    model = None if architecture is None else tiny_model(architecture)
    options = {"max_cache_len": 200, **options}
    with pytest.raises(ValueError, match=f"`max_cache_len`.*{message}"):
        TransformCodingCache(model, **options)


@pytest.mark.slow
def test_generate_compiles_steps_automatically(tiny_llama, fresh_dynamo):
    # Compile on a CPU too, as on GPUs
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    for length in (97, 110, 80):
        call = {**prompts(2, length, 5), "max_new_tokens": 40, "do_sample": False}
        cache, expected = (create_cache("transform", tiny_llama, max_cache_len=200) for _ in range(2))
        tokens = tiny_llama.generate(**call, **as_argument(expected), disable_compile=True)
        assert torch.equal(tiny_llama.generate(**call, **as_argument(cache), compile_config=config), tokens)
        assert cache.stats() == expected.stats() and cache.stats()["dense_reads"] == 0
        require_same_storage(cache, expected)
    # One of the first cache, and one of all others
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["transform", "kivi-2bit"])
@pytest.mark.parametrize(
    "lengths", [(20, 97, 20), pytest.param([20 + 37 * i % 120 for i in range(50)], marks=pytest.mark.long)]
)
def test_prompts_too_short_to_be_packed_are_compiled_too(lengths, preset, tiny_llama, fresh_dynamo):
    """Short prompts break the graph at `update`, so that later prompts run the pieces compiled for them."""
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    counts = []
    for length in lengths:
        call = {**prompts(1, length, length), "max_new_tokens": 5, "do_sample": False}
        cache, expected = (create_cache(preset, tiny_llama, max_cache_len=200) for _ in range(2))
        tokens = tiny_llama.generate(**call, **as_argument(expected), disable_compile=True)
        assert torch.equal(tiny_llama.generate(**call, **as_argument(cache), compile_config=config), tokens)
        counts.append(counters["stats"]["unique_graphs"])
    # The first few prompts have all that any number of prompts need
    assert counts[-1] < 30 and set(counts[5:]) <= {counts[-1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "llama-mqa"))]
)
def test_steps_are_compiled_once(architecture, tiny_model, fresh_dynamo):
    model = tiny_model(architecture)
    ids, tokens = prompts(1, 97)["input_ids"], []
    for step in (model, torch.compile(model, backend="eager", fullgraph=True)):
        cache = TransformCodingCache(model, **OPTIONS)
        first = read(model, cache, ids)
        tokens.append(decode(step, cache, first, 60))
        cache.crop(-2)
        decode(model, cache, first, 2)
        tokens[-1] = torch.cat([tokens[-1], decode(step, cache, first, 10)], dim=1)
    assert torch.equal(*tokens)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_freed_cache_is_named(make_cache):
    cache, states = make_cache(), torch.zeros(1, 2, 1, 16)
    fill(cache, make_states(90), 90)
    number, order = cache.layers[0].graph.number, cache.layers[0].graph.order
    del cache
    gc.collect()
    with pytest.raises(RuntimeError, match="the cache of this graph is gone"):
        static_attention(states, states, states, None, order, number, None)


def test_other_attention_is_refused(tiny_model, fresh_dynamo):
    model = tiny_model("llama", attn_implementation="eager")
    cache = TransformCodingCache(model, **OPTIONS)
    first = read(model, cache, prompts(1, 97)["input_ids"])
    with pytest.raises(Exception, match="compiled for models whose attention is `sdpa`"):
        read(torch.compile(model, backend="eager", fullgraph=True), cache, first)
