"""Prompts that hardly vary, as where one token is repeated, and numbers beyond what scales reach."""

import pytest
import torch
from feeding import HEAD_DIM, feed

from kvcache_plugins import create_cache
from kvcache_plugins.files.schema import pack, unpack
from kvcache_plugins.gear.config import TransformConfig
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.layer_state import LayerState


PROMPT = 150
# A scale comes in steps of 4 %
SCALE_PRECISION = 0.02


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def kernel(monkeypatch, request):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)
    torch.manual_seed(0)


def make_layer(nbits=2.25, quantizer="lloyd-max"):
    return CompressedLayer(TransformConfig(key_nbits=nbits, value_nbits=nbits, quantizer=quantizer).packing(None), 0)


def randn(length, batch_size=1):
    return torch.randn(batch_size, 2, length, HEAD_DIM)


@pytest.mark.each_value
@pytest.mark.parametrize("number", [1.0, -1e-3, 100.0, 0.0])
@pytest.mark.parametrize(
    ("nbits", "quantizer"),
    [*((nbits, "lloyd-max") for nbits in (1, 1.5, 2, 3, 4, 5, 6, 7, 8)), (2, "trellis"), (6, "trellis")],
)
def test_constants_come_back_at_every_width(nbits, quantizer, number):
    layer, constant = make_layer(nbits, quantizer), torch.full((1, 2, PROMPT, HEAD_DIM), number)
    feed(layer, constant, constant)
    output = feed(layer, constant[:, :, :1], constant[:, :, :1])
    for each in (output, layer.materialize("keys"), layer.materialize("values")):
        assert (each - number).abs().max() <= SCALE_PRECISION * abs(number) + 1e-6


def test_a_steady_item_changes_nothing_of_others():
    keys, values = randn(PROMPT, 2), randn(PROMPT, 2)
    values[1] = values[1, :, :1] + 1e-3 * values[1]
    queries, step = torch.randn(2, 4, PROMPT, HEAD_DIM), (randn(1, 2), randn(1, 2))
    outputs = []
    for rows in (slice(0, 2), slice(0, 1)):
        layer = make_layer()
        feed(layer, keys[rows], values[rows], query=queries[rows])
        outputs.append(feed(layer, *(each[rows] for each in step), query=queries[rows, :, :1]))
        assert (layer.codec.tables()[1].mean is None) == (rows.stop == 1)
    torch.testing.assert_close(outputs[0][:1], outputs[1], atol=1e-5, rtol=0)


def test_ordinary_tokens_behind_a_steady_prompt():
    """By the deviations of such a prompt their scales would end before they do."""
    start = randn(1)
    keys, values = (start + 1e-5 * randn(PROMPT) for _ in range(2))
    layer, later = make_layer(4), (start + randn(40), start + randn(40))
    feed(layer, keys, values)
    feed(layer, *later)
    for side, expected in zip(("keys", "values"), later, strict=True):
        held = layer.materialize(side)[:, :, PROMPT:]
        assert (held - expected).square().mean() < 0.05 * expected.var()


def test_an_item_that_waited_may_be_steady():
    keys, values = randn(PROMPT, 2), randn(PROMPT, 2)
    values[1] = 3.0
    layer = make_layer()
    feed(layer, keys, values, padding=[0, PROMPT - 20])
    for _ in range(80):
        feed(layer, randn(1, 2), torch.full((2, 2, 1, HEAD_DIM), 3.0), padding=[0, PROMPT - 20])
    assert layer.codec.tables()[1].mean is not None and layer._pending_sequences is None
    held = layer.materialize("values")[1, :, PROMPT - 20 :]
    assert (held - 3).abs().max() < SCALE_PRECISION


def test_a_steady_layer_goes_on_from_a_file():
    layer, constant = make_layer(), torch.full((1, 2, PROMPT, HEAD_DIM), 2.0)
    feed(layer, constant, constant)
    content, tensors = pack(layer.state())
    assert "tables.values.mean" in tensors
    twin = make_layer()
    state = unpack(LayerState, content, {name: each.clone() for name, each in tensors.items()})
    twin.restore(state, torch.device("cpu"))
    step, query = (randn(1), randn(1)), torch.randn(1, 4, 1, HEAD_DIM)
    assert torch.equal(feed(layer, *step, query=query), feed(twin, *step, query=query))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exponent", [4, 6, 7, 8, 9, 12, 30, 38])
def test_huge_values_are_right_or_refused(exponent, dtype):
    largest = min(10.0**exponent, torch.finfo(dtype).max / 8)
    layer, keys, values = make_layer(4), randn(PROMPT).to(dtype), (randn(PROMPT) * largest).to(dtype)
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
    held = layer.materialize("values")
    assert (held.double() - values.double()).square().mean() < 0.02 * values.double().square().mean()


def test_float16_is_right_to_its_end():
    largest = torch.finfo(torch.float16).max
    layer, values = make_layer(4), torch.full((1, 2, PROMPT, HEAD_DIM), 0.97 * largest, dtype=torch.float16)
    feed(layer, randn(PROMPT).half(), values)
    assert (layer.materialize("values") / values - 1).abs().max() < SCALE_PRECISION


def test_tokens_beyond_a_prompts_scales_are_refused():
    layer, step = make_layer(4), (randn(1), randn(1))
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
        ("gear", ("\n" * 700,)),
        *(
            pytest.param(name, ("\n" * 700, " the" * 300, "." * 1200, " 0" * 300), marks=pytest.mark.long)
            for name in ("gear", "gear-t16", "gear-t30")
        ),
    ],
    ids=["gear", "gear-all", "gear-t16", "gear-t30"],
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


def test_tokens_in_turn_have_no_error_in_common():
    """Two tokens have two errors, which a sum over all of them keeps: it is their mean that goes."""
    two = torch.randn(1, 2, 2, HEAD_DIM)
    keys, values = torch.zeros(1, 2, PROMPT, HEAD_DIM), two.repeat(1, 1, PROMPT // 2, 1)
    layer = make_layer(2)
    feed(layer, keys, values)
    error = (layer.materialize("values") - values)[:, :, 4:]
    assert error.square().mean() > 0.01
    assert error.mean(dim=2).square().mean() < 1e-4 * error.square().mean()


def test_what_waits_and_pads_has_no_say_in_scales_and_errors():
    keys, values = randn(PROMPT, 2), randn(PROMPT, 2)
    values[1, :, :100] = 1e5
    padded, alone = make_layer(), make_layer()
    queries = torch.randn(2, 4, PROMPT, HEAD_DIM)
    feed(padded, keys, values, [0, 100], queries)
    feed(alone, keys[:1], values[:1], query=queries[:1])
    assert padded._pending_sequences is not None and padded.codec.tables()[1].mean is None
    torch.testing.assert_close(padded.materialize("values")[:1], alone.materialize("values"), atol=1e-5, rtol=0)
