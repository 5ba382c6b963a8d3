"""Static layers of chunks: the bytes of layers that grow, with capacity reserved and steps that are compiled once."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.generation import CompileConfig

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.models.cache_argument import as_argument


PRESETS = ["gear", "gear-2bit", "kivi-2bit", "gear-k4v3"]
# Chunks that are packed often
SHORT = {"residual_length": 16}


@pytest.fixture
def make_cache(tiny_model):
    """A cache of one layer of two heads of 16."""
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=2)

    def make(preset, max_cache_len=400, **options):
        return create_cache(preset, model.config, max_cache_len=max_cache_len, **options)

    return make


def make_states(count, batch_size=1, seed=0):
    return torch.randn(2, batch_size, 2, count, 16, generator=torch.Generator().manual_seed(seed))


def fill(cache, states, *counts, padding=0):
    """Give a cache of one layer the first tokens of `states`, some at a time, and return attention to them."""
    outputs, batch_size = [], states.shape[1]
    for count in counts:
        first = cache.get_seq_length()
        keys, values = cache.update(*(each[:, :, first : first + count] for each in states), 0)
        mask = torch.ones(count, first + count, dtype=torch.bool).tril(first).expand(batch_size, 1, -1, -1).clone()
        mask[0, :, :, :padding] = False
        if not padding:
            mask = None
        query = torch.ones(batch_size, 2, count, 16)
        is_causal = mask is None and first == 0
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, is_causal=is_causal)
        )
    return outputs


def side_tensors(segments, side):
    """All chunks of segments that hold chunks of one length, by name, each with the segments' lengths."""
    found = {}
    for segment in segments:
        for name, tensor in segment.stored()[side].items():
            found.setdefault((name, tensor.shape[3:]), []).append(tensor)
    return {name: torch.cat(tensors, dim=2) for name, tensors in found.items()}


def require_same_storage(cache, other):
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length() and mine.exact_start == theirs.exact_start
        held = [[each for each in layer.storage.segments if each.length] for layer in (mine, theirs)]
        assert sum(each.length for each in held[0]) == sum(each.length for each in held[1])
        for side in (0, 1):
            own, expected = (side_tensors(segments, side) for segments in held)
            assert own.keys() == expected.keys()
            for name, tensor in own.items():
                assert torch.equal(tensor, expected[name]), name
        tails = [layer.storage.tail for layer in (mine, theirs)]
        assert len({tail is None or not tail.length for tail in tails}) == 1
        if tails[1] is not None and tails[1].length:
            assert torch.equal(tails[0].keys, tails[1].keys) and torch.equal(tails[0].values, tails[1].values)


LENGTHS = {
    "prompt": (130, *[1] * 140),
    "second-prompt": (90, *[1] * 70, 300, *[1] * 70),
    "several-at-once": (90, *[1] * 60, 7, 1, 1, 50, *[1] * 41),
    "short-prompt": (9, *[1] * 140),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("preset", PRESETS)
def test_bytes_equal_those_of_a_growing_layer(make_cache, preset, lengths):
    """Compare bytes at every length."""
    states, static, growing = make_states(700), make_cache(preset), make_cache(preset, max_cache_len=None)
    for count in LENGTHS[lengths]:
        outputs = fill(static, states, count), fill(growing, states, count)
        assert torch.equal(outputs[0][0], outputs[1][0])
        require_same_storage(static, growing)
    for name in ("tokens_compressed", "chunks_compressed", "tokens_exact"):
        assert static.stats()[name] == growing.stats()[name]
    assert static.layers[0].is_compileable and not growing.layers[0].is_compileable


@pytest.mark.parametrize(
    "options",
    [
        {"backbone": "per-token"},
        {"nbits": 2, "q_group_size": 8},
        {"sparsity": 0.2, "rank": 0},
        {"num_sink_tokens": 3, "rotate_values": True, "nbits": 3},
    ],
)
@pytest.mark.parametrize("length", [5, 70])
def test_bytes_with_options_and_padding_equal_those_of_a_growing_layer(make_cache, options, length):
    states = make_states(200, batch_size=2)
    static, growing = (make_cache("gear", max_cache_len=most, **SHORT, **options) for most in (250, None))
    for count in (length, *[1] * 60):
        for cache in (static, growing):
            fill(cache, states, count, padding=3)
        require_same_storage(static, growing)
    assert static.layers[0].graph is not None


def test_chunks_stay_in_place_within_capacity(make_cache):
    states, cache = make_states(300), make_cache("gear-2bit", max_cache_len=170, **SHORT)
    fill(cache, states, 96, 1)
    layer = cache.layers[0]
    graph, place = layer.graph, layer.storage.segments[-1].keys.codes.data_ptr()
    assert graph.num_columns == 170 and layer.get_mask_sizes(1) == (170, 0)
    fill(cache, states, *[1] * 70)
    assert layer.graph is graph and layer.storage.segments[-1].keys.codes.data_ptr() == place
    fill(cache, states, *[1] * 100)
    assert layer.graph is not graph and layer.graph.num_columns > 190
    expected = make_cache("gear-2bit", max_cache_len=None, **SHORT)
    fill(expected, states, 96, *[1] * 171)
    require_same_storage(cache, expected)


def test_cropped_tokens_leave_no_trace(make_cache):
    states, cache, expected = make_states(200), *(make_cache("gear-2bit", **SHORT) for _ in range(2))
    fill(cache, states, 90, *[1] * 20)
    for count in (1, 3):
        fill(cache, torch.cat((states[..., :110, :], make_states(9, seed=1)), dim=3), *[count] * (3 // count))
        cache.crop(-3)
    fill(cache, states, *[1] * 40)
    fill(expected, states, 90, *[1] * 60)
    require_same_storage(cache, expected)


def test_forks_attend_to_shared_and_own_tokens(make_cache):
    states, outputs, forks = make_states(200), [], []
    for most in (300, None):
        cache = make_cache("gear-2bit", max_cache_len=most, **SHORT)
        fill(cache, states, 90, *[1] * 20)
        forks += cache.fork(1)
        outputs.append(fill(forks[-1], states, *[1] * 50))
    for static, growing in zip(*outputs, strict=True):
        assert torch.equal(static, growing)
    require_same_storage(*forks)


@pytest.mark.parametrize("preset", ["gear-2bit", "gear-k4v3"])
def test_a_static_cache_serves_eager_steps_at_any_time(tiny_llama, tmp_path, preset):
    cache = create_cache(preset, tiny_llama, max_cache_len=300, **SHORT)
    ids = torch.randint(3, 96, (2, 60), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def decode(each):
        return torch.cat([tiny_llama(ids[:, :1], **as_argument(each)).logits for _ in range(30)], dim=1)

    with torch.no_grad():
        tiny_llama(ids, **as_argument(cache))
    decode(cache)
    cache.save(tmp_path / "cache", tiny_llama)
    others = [copy.deepcopy(cache), GEARCache.load(tmp_path / "cache", tiny_llama)]
    # Capacity is memory too
    assert cache.memory().total_bytes > others[1].memory().total_bytes
    others += cache.fork(1)
    for other in others:
        require_same_storage(other, cache)
    logits = [decode(each) for each in (cache, *others)]
    for each in logits[1:]:
        torch.testing.assert_close(each, logits[0], rtol=1e-4, atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0


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
    with pytest.raises(ValueError, match=f"`max_cache_len`.*{message}"):
        GEARCache(model, **{"max_cache_len": 200, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["gear-2bit", *(pytest.param(name, marks=pytest.mark.long) for name in PRESETS[2:])]
)
def test_generate_compiles_steps_automatically(tiny_llama, fresh_dynamo, preset):
    """One graph has ordinary steps and those that pack."""
    # Compile on a CPU too, as on GPUs
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    for length in (97, 110):
        ids = torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        call = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 80, "do_sample": False}
        cache, expected = (create_cache(preset, tiny_llama, max_cache_len=250, **SHORT) for _ in range(2))
        tokens = tiny_llama.generate(**call, **as_argument(expected), disable_compile=True)
        assert torch.equal(tiny_llama.generate(**call, **as_argument(cache), compile_config=config), tokens)
        assert cache.stats() == expected.stats() and cache.stats()["dense_reads"] == 0
        require_same_storage(cache, expected)
    # One of the first cache, and one of all others
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
