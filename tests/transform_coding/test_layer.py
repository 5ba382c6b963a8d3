"""When a layer codes what, what of a batch stays exact, and that what it attends to is what it holds; prompts that
hardly vary, as where one token is repeated, and numbers beyond what scales reach.
"""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from feeding import HEAD_DIM, NUM_HEADS, feed, states

from kvcache_plugins import TransformCodingCache, create_cache, measure_memory
from kvcache_plugins.files.schema import pack, unpack
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import RotaryEmbedding
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.layer_state import LayerState
from kvcache_plugins.layers.phase import Phase
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.transform_coding.config import MIN_TOKENS, TransformCodingConfig


SINKS, BUFFER = 4, 8
FREQUENCIES = tuple((100.0 ** -(torch.arange(16) / 16)).tolist())
CONFIG = TransformCodingConfig(
    key_nbits=4, value_nbits=3, residual_length=BUFFER, num_sink_tokens=SINKS, recent_length=64
)


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def kernel(monkeypatch, request):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)
    torch.manual_seed(0)


def make_layer(config: TransformCodingConfig = CONFIG) -> RowLayer:
    return RowLayer(config.policy(RotaryEmbedding(FREQUENCIES)), 0)


def num_coded(layer):
    return sum(block.length for block in layer.storage.segments)


@pytest.mark.each_value
@pytest.mark.parametrize("length", [1, 67, 68, 69, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attended_states_equal_to_dense(length, dtype):
    layer = make_layer()
    feed(layer, *states(2, length, dtype))
    # Longer updates are coded once attention has seen them, and are held otherwise than they were attended to
    for count in (1, 3, 9, 30, 1):
        query = torch.randn(2, NUM_HEADS * 2, count, HEAD_DIM).to(dtype)
        output = feed(layer, *states(2, count, dtype), query=query)
        held = [layer.to_dense(side) for side in ("keys", "values")]
        assert held[0].dtype == dtype and held[0].shape == (2, NUM_HEADS, layer.get_seq_length(), HEAD_DIM)
        total = layer.get_seq_length()
        mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        expected = F.scaled_dot_product_attention(
            query.float(), *(each.float() for each in held), attn_mask=mask, enable_gqa=True
        )
        limit = 1e-4 if dtype == torch.float32 else 0.03
        assert float((output.float() - expected).abs().max()) < limit


def test_attention_equals_attention_over_decoded_rows():
    """Sequences of different lengths, one still without a table; decoded tokens are coded too."""
    cache = TransformCodingCache(key_nbits=3, value_nbits=2, residual_length=BUFFER)
    cache.layers.append(layer := cache._next_layer())
    feed(layer, *states(2, 150), padding=[0, 100])
    for count in (1, 9, 60, 1):
        query, before = torch.randn(2, NUM_HEADS * 2, count, HEAD_DIM), num_coded(layer)
        output = feed(layer, *states(2, count), padding=[0, 100], query=query)
        held = [layer.to_dense(side) for side in ("keys", "values")]
        if count < 4 * BUFFER:
            mask = torch.arange(held[0].shape[2]) >= torch.tensor([0, 100])[:, None]
            mask = mask[:, None, None].expand(-1, 1, count, -1).tril(held[0].shape[2] - count)
            expected = F.scaled_dot_product_attention(query, *held, attn_mask=mask, enable_gqa=True)
            assert float((output - expected).abs().max()) < 1e-4
        assert num_coded(layer) >= before > 0


def test_a_token_is_exact_then_finer_then_coarser():
    layer, keys_and_values = make_layer(), states(1, SINKS + MIN_TOKENS - 1)
    feed(layer, *keys_and_values)
    assert layer.codec is None and num_coded(layer) == 0
    feed(layer, *states(1, 1))
    assert num_coded(layer) == 0
    # Enough tokens now: coded when the next one comes
    feed(layer, *states(1, 1))
    assert (
        num_coded(layer) == MIN_TOKENS and layer.storage.prefix.num_slots == SINKS and layer.storage.tail.length == 1
    )
    assert torch.equal(layer.to_dense("keys")[:, :, :SINKS], keys_and_values[0][:, :, :SINKS])
    assert layer.codec.rope.name in ("half-split", "interleaved", "none")
    for _ in range(BUFFER - 1):
        feed(layer, *states(1, 1))
    assert layer.storage.tail.length == BUFFER
    feed(layer, *states(1, 1))
    # The newer ones stay
    kept = layer.policy.num_kept
    assert 0 < kept < BUFFER and layer.storage.tail.length == kept + 1
    assert [(each.length, each.is_recent) for each in layer.storage.segments] == [
        (MIN_TOKENS, False),
        (BUFFER - kept, True),
    ]
    # A long update is coded as soon as attention has seen it
    feed(layer, *states(1, 100))
    assert num_coded(layer) == layer.get_seq_length() - SINKS and layer.storage.tail is None
    assert layer.stats()["tokens_exact"] == SINKS


@torch.no_grad()
def test_dense_tokens_are_packed_at_the_minimum_count():
    layer = make_layer()
    feed(layer, *states(1, SINKS + MIN_TOKENS - 2))
    for _ in range(2):
        feed(layer, *states(1, 1))
        assert num_coded(layer) == 0
    feed(layer, *states(1, 1))
    assert num_coded(layer) == MIN_TOKENS


@torch.no_grad()
def test_recent_rows_keep_their_bits_up_to_the_limit():
    num_packed = BUFFER - CONFIG.policy(RotaryEmbedding(FREQUENCIES)).num_kept
    layer = make_layer(dataclasses.replace(CONFIG, recent_length=5 * num_packed))
    feed(layer, *states(1, 100))
    lengths = set()
    for _ in range(60):
        feed(layer, *states(1, 1))
        newest = layer.storage.newest
        lengths.add(newest.length if newest.is_recent else 0)
    assert max(lengths) == 5 * num_packed


def test_dropped_tokens_of_the_prefix_are_not_attended_to():
    layer, (keys, values) = make_layer(), states(1, 100)
    feed(layer, keys, values)
    layer.crop(SINKS - 2 - 100)
    query, new = torch.randn(1, NUM_HEADS * 2, 1, HEAD_DIM), states(1, 1)
    output = feed(layer, *new, query=query)
    held = [torch.cat((each[:, :, : SINKS - 2], one), dim=2) for each, one in zip((keys, values), new, strict=True)]
    expected = F.scaled_dot_product_attention(query, *held, enable_gqa=True)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_newest_packed_tokens_have_more_bits():
    """A token moves twice, each time by its own row; a copy goes its own way; a crop finds what there was."""
    layer, most, fed = make_layer(), CONFIG.recent_length, []

    def errors(layer):
        exact, held = torch.cat(fed, dim=2), layer.to_dense("keys")
        return (held - exact[:, :, : held.shape[2]]).square().mean(dim=(0, 1, 3))

    for count in [100] + [1] * 100:
        keys, values = states(1, count)
        fed.append(keys)
        feed(layer, keys, values)
        assert all(not block.is_recent for block in layer.storage.segments[:-1])
        assert layer.storage.segments[-1].length <= most or not layer.storage.segments[-1].is_recent
    (older, recent), lost = layer.storage.segments, errors(layer)
    first, last = recent.start, recent.start + recent.length
    assert recent.is_recent and most // 2 <= recent.length <= most and first > 100
    # Two bits more are a twelfth of the errors and less, but for tokens that are larger than those before
    assert lost[first:last].mean() < 0.12 * lost[SINKS:100].mean()
    assert lost[100:first].mean() > 0.7 * lost[SINKS:100].mean()
    # Coded anew from their own rows, one by one
    codec, at = layer.codec.with_more_bits(CONFIG.recent_nbits), slice(100, first)
    once = codec.encode(fed_keys := torch.cat(fed, dim=2)[:, :, at], fed_keys, Positions(100))[0]
    again = layer.codec.encode(codec.decode_keys(once, Positions(100)), fed_keys, Positions(100))[0]
    assert torch.equal(older.keys[:, :, 100 - older.start : older.length], again)
    before = [layer.to_dense(side) for side in ("keys", "values")]
    copied = copy.deepcopy(layer)
    for _ in range(most):
        feed(copied, *states(1, 1))
    assert all(map(torch.equal, before, (layer.to_dense(side) for side in ("keys", "values"))))
    for length in (last - 3, first - 2, 90):
        layer.crop(length - layer.get_seq_length())
        assert torch.equal(layer.to_dense("keys"), before[0][:, :, :length])
    # A prompt behind them leaves no recent ones
    feed(copied, *states(1, 100))
    assert [each.is_recent for each in copied.storage.segments] == [False] and copied.storage.tail is None


def test_the_newest_update_is_exact():
    layer = make_layer()
    feed(layer, *states(1, 200))
    new = states(1, 30)
    feed(layer, *new)
    for side, exact in zip(("keys", "values"), new, strict=True):
        assert torch.equal(layer.to_dense(side)[:, :, -30:], exact)


@pytest.mark.parametrize("padding", [120, 150])
def test_a_sequence_may_begin_in_a_later_chunk(padding):
    """As in a prefill by chunks of a padded batch: nothing of its padding gets into its table or the exact tokens."""
    (keys, values), query = states(2, 200), torch.randn(2, NUM_HEADS * 2, 200, HEAD_DIM)
    layer, alone = make_layer(), make_layer()
    for chunk in (slice(0, 100), slice(100, 200)):
        feed(layer, keys[:, :, chunk], values[:, :, chunk], [0, padding], query[:, :, chunk])
    feed(alone, *(each[1:, :, padding:] for each in (keys, values)), None, query[1:, :, padding:])
    is_waiting = 200 - padding < SINKS + MIN_TOKENS
    assert (layer._unfitted_sequences is not None) is is_waiting and layer.storage.prefix.start.tolist() == [
        0,
        padding,
    ]
    assert layer.storage.prefix.count.tolist() == [SINKS, 200 - padding if is_waiting else SINKS]
    for side, exact in (("keys", keys), ("values", values)):
        held = layer.to_dense(side)[1:, :, padding:]
        torch.testing.assert_close(held, alone.to_dense(side), atol=1e-3, rtol=0)
        assert torch.equal(held[:, :, :SINKS], exact[1:, :, padding : padding + SINKS])
    for _ in range(MIN_TOKENS):
        feed(layer, *states(2, 1), [0, padding])
    assert layer._unfitted_sequences is None and layer.storage.prefix.start.tolist() == [0, padding]


def test_a_short_sequence_stays_exact_until_it_is_fitted():
    layer, (keys, values) = make_layer(), states(2, 100)
    feed(layer, keys, values, [0, 90])
    assert layer._unfitted_sequences is not None and layer.storage.prefix.count.tolist() == [SINKS, 10]
    new = [states(2, 1) for _ in range(BUFFER + 1)]
    for each in new:
        feed(layer, *each, [0, 90])
    # Tokens that the other sequences have packed
    num_old = BUFFER - layer.policy.num_kept
    assert layer.storage.prefix.count.tolist() == [SINKS, 10 + num_old]
    held = layer.to_dense("values")[1, :, 90:]
    assert torch.equal(held, torch.cat([values[1, :, 90:], *(each[1][1] for each in new)], dim=1))
    # A copy and a selection take the waiting ones along
    layer.batch_select_indices(torch.tensor([1, 0, 1]))
    assert layer.storage.prefix.count.tolist() == [10 + num_old, SINKS, 10 + num_old]
    for _ in range(MIN_TOKENS):
        feed(layer, *states(3, 1), [90, 0, 90])
    assert layer._unfitted_sequences is None
    # Dropped tokens take no room behind a view
    assert layer.storage.prefix.keys.untyped_storage().nbytes() == layer.storage.prefix.keys.nbytes
    materialized = layer.to_dense("values")
    assert torch.equal(materialized[0, :, 90 : 100 + num_old], held[:, : 10 + num_old])


def test_memory_is_rows_tables_and_exact_tokens():
    cache = TransformCodingCache(nbits=2.5, value_nbits=2)
    keys, values = states(1, 1024, torch.bfloat16, 64)
    cache.update(keys, values, 0)
    cache.layers[0].commit_prompt()
    parts = measure_memory(cache).parts
    key_bits, value_bits = 20, 16
    assert parts["codes"] == NUM_HEADS * 1020 * (2 + key_bits + value_bits)
    # Order, mean, deviation and widths of keys; deviation and widths of values
    assert parts["scales"] == NUM_HEADS * (64 + 2 * 64 + 2 * 64 + 8 + 2 + 8)
    assert parts["residual"] == NUM_HEADS * 4 * 64 * 2 * 2 and parts["spare"] == 0


def test_dense_states_are_the_same_tile_by_tile(monkeypatch):
    """A tile's positions go on where the one before ended."""
    layer = make_layer()
    feed(layer, *states(2, 300), padding=[0, 37])
    feed(layer, *states(2, 1), padding=[0, 37])
    whole = [layer.to_dense(side) for side in ("keys", "values")]
    monkeypatch.setattr("kvcache_plugins.kernels.ops.TILE_TOKENS", 64)
    for dense, side in zip(whole, ("keys", "values"), strict=True):
        torch.testing.assert_close(layer.to_dense(side), dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([2.0, 0.0, -1.0, 4.0])[None, :, None, None]}]
)
def test_softcaps_and_sinks_are_attended_with(extra):
    layer, query = make_layer(), 3 * torch.randn(1, 2 * NUM_HEADS, 1, HEAD_DIM)
    feed(layer, *states(1, 200))
    layer.update(*states(1, 1))
    keys, values = (layer.to_dense(side).repeat_interleave(2, dim=1) for side in ("keys", "values"))
    scores = query @ keys.transpose(2, 3) / HEAD_DIM**0.5
    if "softcap" in extra:
        scores = (scores / extra["softcap"]).tanh() * extra["softcap"]
    if "sinks" in extra:
        scores = torch.cat([scores, extra["sinks"]], dim=3)
    expected = scores.softmax(dim=3)[..., : keys.shape[2]] @ values
    torch.testing.assert_close(layer.attend(AttentionCall(query, **extra)), expected, atol=1e-4, rtol=1e-3)


PROMPT = 150
# A scale comes in steps of 4 %
SCALE_PRECISION = 0.02


def steady_layer(nbits=2.25):
    return RowLayer(TransformCodingConfig(key_nbits=nbits, value_nbits=nbits).policy(), 0)


def randn(length, batch_size=1):
    return torch.randn(batch_size, 2, length, HEAD_DIM)


@pytest.mark.each_value
@pytest.mark.parametrize("number", [1.0, -1e-3, 100.0, 0.0])
@pytest.mark.parametrize("nbits", [1, 1.5, 2, 3, 4, 5, 6, 7, 8])
def test_constants_are_restored_at_every_width(nbits, number):
    layer, constant = steady_layer(nbits), torch.full((1, 2, PROMPT, HEAD_DIM), number)
    feed(layer, constant, constant)
    output = feed(layer, constant[:, :, :1], constant[:, :, :1])
    for each in (output, layer.to_dense("keys"), layer.to_dense("values")):
        assert (each - number).abs().max() <= SCALE_PRECISION * abs(number) + 1e-6


def test_a_constant_sequence_does_not_change_others():
    keys, values = randn(PROMPT, 2), randn(PROMPT, 2)
    values[1] = values[1, :, :1] + 1e-3 * values[1]
    queries, step = torch.randn(2, 4, PROMPT, HEAD_DIM), (randn(1, 2), randn(1, 2))
    outputs = []
    for rows in (slice(0, 2), slice(0, 1)):
        layer = steady_layer()
        feed(layer, keys[rows], values[rows], query=queries[rows])
        outputs.append(feed(layer, *(each[rows] for each in step), query=queries[rows, :, :1]))
        assert (layer.codec.formats()[1].mean is None) == (rows.stop == 1)
    torch.testing.assert_close(outputs[0][:1], outputs[1], atol=1e-5, rtol=0)


def test_ordinary_tokens_behind_a_constant_prompt_are_coded_well():
    """Scales from the deviations of such a prompt would be too small for these tokens."""
    start = randn(1)
    keys, values = (start + 1e-5 * randn(PROMPT) for _ in range(2))
    layer, later = steady_layer(4), (start + randn(40), start + randn(40))
    feed(layer, keys, values)
    feed(layer, *later)
    for side, expected in zip(("keys", "values"), later, strict=True):
        held = layer.to_dense(side)[:, :, PROMPT:]
        assert (held - expected).square().mean() < 0.05 * expected.var()


def test_a_short_sequence_may_be_constant():
    keys, values = randn(PROMPT, 2), randn(PROMPT, 2)
    values[1] = 3.0
    layer = steady_layer()
    feed(layer, keys, values, padding=[0, PROMPT - 20])
    for _ in range(80):
        feed(layer, randn(1, 2), torch.full((2, 2, 1, HEAD_DIM), 3.0), padding=[0, PROMPT - 20])
    assert layer.codec.formats()[1].mean is not None and layer._unfitted_sequences is None
    held = layer.to_dense("values")[1, :, PROMPT - 20 :]
    assert (held - 3).abs().max() < SCALE_PRECISION


def test_a_constant_layer_continues_from_a_file():
    layer, constant = steady_layer(), torch.full((1, 2, PROMPT, HEAD_DIM), 2.0)
    feed(layer, constant, constant)
    content, tensors = pack(layer.state())
    assert "tables.values.mean" in tensors
    twin = steady_layer()
    state = unpack(LayerState, content, {name: each.clone() for name, each in tensors.items()})
    twin.restore(state, torch.device("cpu"))
    step, query = (randn(1), randn(1)), torch.randn(1, 4, 1, HEAD_DIM)
    assert torch.equal(feed(layer, *step, query=query), feed(twin, *step, query=query))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exponent", [4, 6, 7, 8, 9, 12, 30, 38])
def test_huge_values_are_exact_or_refused(exponent, dtype):
    largest = min(10.0**exponent, torch.finfo(dtype).max / 8)
    layer, keys, values = steady_layer(4), randn(PROMPT).to(dtype), (randn(PROMPT) * largest).to(dtype)
    if largest > 1e6:
        try:
            feed(layer, keys, values)
        except ValueError as error:
            assert "layer 0" in str(error)
            layer.reset()
            values = randn(PROMPT).to(dtype)
            feed(layer, keys, values)
    else:
        feed(layer, keys, values)
    held = layer.to_dense("values")
    assert (held.double() - values.double()).square().mean() < 0.02 * values.double().square().mean()


def test_states_near_the_largest_float16_are_coded():
    largest = torch.finfo(torch.float16).max
    layer, values = steady_layer(4), torch.full((1, 2, PROMPT, HEAD_DIM), 0.97 * largest, dtype=torch.float16)
    feed(layer, randn(PROMPT).half(), values)
    assert (layer.to_dense("values") / values - 1).abs().max() < SCALE_PRECISION


def test_tokens_beyond_a_prompts_scales_are_refused():
    layer, step = steady_layer(4), (randn(1), randn(1))
    feed(layer, randn(PROMPT), randn(PROMPT))
    for _ in range(6):
        feed(layer, *step)
    length = layer.get_seq_length()
    feed(layer, randn(1), 1e5 * randn(1))
    with pytest.raises(ValueError, match="layer 0: tokens are too large"):
        for _ in range(8):
            feed(layer, *step)
    layer.crop(length - layer.get_seq_length())
    for _ in range(20):
        assert feed(layer, *step).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["compiled", pytest.param("torch", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("transform", ("\n" * 700,)),
        *(
            pytest.param(name, ("\n" * 700, " the" * 300, "." * 1200, " 0" * 300), marks=pytest.mark.long)
            for name in ("transform", "transform-16", "transform-30")
        ),
    ],
    ids=["transform", "gear-all", "transform-16", "transform-30"],
)
def test_repeated_tokens_lose_little_more_than_text(smollm2, licence_ids, name, texts, kernel, divergence):
    model, tokenizer = smollm2
    tail = licence_ids[0, 160:200]

    def lost(prompt):
        cache = create_cache(name, model, calibration=None)
        return divergence(model, cache, torch.cat([prompt, tail]), num_prompt=len(prompt))

    bound = 3 * lost(licence_ids[0, :160])
    for repeated in texts:
        assert lost(tokenizer(repeated, return_tensors="pt").input_ids[0, :160]) <= bound


def test_alternating_tokens_have_no_common_error():
    """Two tokens have two errors, which a sum over all of them keeps: it is their mean that goes."""
    two = torch.randn(1, 2, 2, HEAD_DIM)
    keys, values = torch.zeros(1, 2, PROMPT, HEAD_DIM), two.repeat(1, 1, PROMPT // 2, 1)
    layer = steady_layer(2)
    feed(layer, keys, values)
    error = (layer.to_dense("values") - values)[:, :, 4:]
    assert error.square().mean() > 0.01
    assert error.mean(dim=2).square().mean() < 1e-4 * error.square().mean()


def test_waiting_and_padding_tokens_do_not_affect_scales():
    keys, values = randn(PROMPT, 2), randn(PROMPT, 2)
    values[1, :, :100] = 1e5
    padded, alone = steady_layer(), steady_layer()
    queries = torch.randn(2, 4, PROMPT, HEAD_DIM)
    feed(padded, keys, values, [0, 100], queries)
    feed(alone, keys[:1], values[:1], query=queries[:1])
    assert padded._unfitted_sequences is not None and padded.codec.formats()[1].mean is None
    torch.testing.assert_close(padded.to_dense("values")[:1], alone.to_dense("values"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [(100,), (40, 60)])
def test_queries_of_a_refused_prompt_are_not_fitted_to(lengths):
    """Also where the prompt comes in chunks, and a later one is refused."""
    layer, expected = make_layer(), make_layer()
    for count in lengths:
        keys, values = states(1, count)
        query = torch.randn(1, NUM_HEADS * 2, count, HEAD_DIM)
        if count == lengths[-1]:
            with pytest.raises(ValueError, match="NaN"):
                feed(layer, keys / 0 * 0, values, query=query * torch.nan)
        for each in (layer, expected):
            feed(each, keys, values, query=query)
    tables = [each.codec.state().keys for each in (layer, expected)]
    assert all(torch.equal(own, tables[1][name]) for name, own in tables[0].items())


def test_a_refused_update_fits_no_late_sequence():
    """The longer sequence has a token beyond its scales, as the other gets its table."""
    layer = make_layer()
    feed(layer, *states(2, 150), padding=[0, 100])
    before = copy.deepcopy(layer)
    keys, values = states(2, 40)
    keys[0, 0, 3] *= 1e5
    with pytest.raises(ValueError, match="too large beside those"):
        feed(layer, keys, values, padding=[0, 100])
    keys, values = states(2, 40)
    query = torch.randn(2, NUM_HEADS * 2, 40, HEAD_DIM)
    for each in (layer, before):
        feed(each, keys, values, padding=[0, 100], query=query)
    for side in ("keys", "values"):
        assert torch.equal(layer.to_dense(side), before.to_dense(side))


@torch.no_grad()
def test_a_refused_tail_leaves_a_layer_dense():
    layer = make_layer()
    feed(layer, *states(1, SINKS + MIN_TOKENS - 8))
    for number in range(8):
        keys, values = states(1, 1)
        feed(layer, keys if number < 7 else keys / 0 * 0, values)
    limits = layer._dense
    with pytest.raises(ValueError, match="NaN"):
        feed(layer, *states(1, 1))
    assert layer._dense == limits and layer.phase is Phase.DENSE


def test_a_restored_layer_has_a_prefix_of_its_own():
    layer, other = make_layer(), make_layer()
    feed(layer, *states(1, 100))
    other.restore(layer.state(), torch.device("cpu"))
    other.crop(2 - 100)
    assert layer.storage.prefix.count.tolist() == [SINKS]
