"""Codecs that are fitted again as sequences grow: when, which rows stay, and errors by the order of tokens."""

import copy

import pytest
import torch
from feeding import HEAD_DIM, NUM_HEADS, feed, states

from kvcache_plugins import TransformCodingCache
from kvcache_plugins.files.schema import pack, unpack
from kvcache_plugins.formats.rotary import RotaryEmbedding
from kvcache_plugins.gear import GEARCache
from kvcache_plugins.layers.layer_state import LayerState
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.transform_coding.config import TransformCodingConfig


FREQUENCIES = tuple((100.0 ** -(torch.arange(16) / 16)).tolist())
CONFIG = TransformCodingConfig(key_nbits=4, value_nbits=3, residual_length=8, recent_length=16)


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def kernel(monkeypatch, request):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)
    torch.manual_seed(0)


def make_layer() -> RowLayer:
    return RowLayer(CONFIG.policy(RotaryEmbedding(FREQUENCIES)), 0)


def other_kind(count, batch_size=1):
    """Keys and values whose channels differ from those of `states`, in size and mean."""
    factors = torch.linspace(-1, 1, HEAD_DIM).mul(3).exp()
    keys, values = states(batch_size, count)
    return keys * factors + 2 * factors, values * 4


def rows_of(layer):
    return [
        each[:, :, : segment.length] for segment in layer.storage.segments for each in (segment.keys, segment.values)
    ]


def lengths_of(layer):
    return [(segment.length, segment.codec is not None) for segment in layer.storage.segments]


def feed_in(layer, keys, values, sizes):
    for own_keys, own_values in zip(keys.split(sizes, dim=2), values.split(sizes, dim=2), strict=True):
        feed(layer, own_keys, own_values)


def test_codec_is_fitted_again_once_a_sequence_is_four_times_as_long():
    layer = make_layer()
    feed(layer, *states(1, 80))
    feed(layer, *states(1, 239))
    first, before = layer.codec, rows_of(layer)
    assert first.fitted_length == 80
    feed(layer, *states(1, 100))
    assert layer.codec is not first and layer.codec.fitted_length == 419
    assert lengths_of(layer) == [(315, True), (100, False)]
    # Older rows keep their bytes and their table
    assert all(torch.equal(*pair) for pair in zip(before, rows_of(layer), strict=False))
    assert layer._moments is None


def test_decoded_tokens_are_fitted_to_at_the_same_lengths():
    layer = make_layer()
    feed(layer, *states(1, 80))
    for _ in range(239):
        feed(layer, *states(1, 1))
    assert layer.codec.fitted_length == 80
    for _ in range(9):
        feed(layer, *states(1, 1))
    fitted = layer.codec.fitted_length
    assert 320 <= fitted < 329
    older, newer, recent = layer.storage.segments[0], layer.storage.segments[-2], layer.storage.segments[-1]
    assert older.codec is not None and recent.codec is None and recent.is_recent
    assert newer is older or newer.codec is None
    for _ in range(30):
        feed(layer, *states(1, 1))
    assert layer.codec.fitted_length == fitted


@pytest.mark.parametrize("sizes", [[80, 520], [60] * 10], ids=["turn", "chunks"])
def test_refitted_tokens_have_nearly_the_error_of_one_prompt(sizes, monkeypatch):
    """A short turn of one kind, then another kind of text."""
    parts = states(1, 70), other_kind(530)
    keys, values = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))

    def errors(updates):
        layer = make_layer()
        feed_in(layer, keys, values, updates)
        pairs = zip(map(layer.to_dense, ("keys", "values")), (keys, values), strict=True)
        return [float((held - own)[:, :, -100:].square().mean()) for held, own in pairs]

    whole, other = errors([600]), errors(sizes)
    assert other[0] < 1.15 * whole[0] and other[1] < 1.15 * whole[1]
    # Tables that are kept for good are of the first turn
    monkeypatch.setattr("kvcache_plugins.layers.row_layer._FIT_GROWTH", 10**6)
    assert errors(sizes)[0] > 2 * whole[0]


def test_rollback_restores_the_codec_of_the_remaining_rows():
    layer = make_layer()
    feed(layer, *states(1, 80))
    first, before = layer.codec, rows_of(layer)
    feed(layer, *states(1, 300))
    assert layer.codec is not first
    layer.crop(-300)
    assert layer.codec.fitted_length == 80 and lengths_of(layer) == [(76, False)]
    assert all(torch.equal(*pair) for pair in zip(before, rows_of(layer), strict=True))
    again = make_layer()
    again.restore(layer.state(), torch.device("cpu"))
    new = states(1, 300)
    feed(layer, *new)
    feed(again, *new)
    assert torch.equal(layer.to_dense("keys"), again.to_dense("keys"))


def test_copies_and_files_have_all_tables():
    layer = make_layer()
    feed_in(layer, *states(1, 380), [80, 300])
    for _ in range(30):
        feed(layer, *states(1, 1))
    copied = copy.deepcopy(layer)
    state, tensors = pack(layer.state())
    assert "blocks.0.tables.keys.deviation" in tensors and "tables.keys.deviation" in tensors
    loaded = make_layer()
    loaded.restore(
        unpack(LayerState, state, {name: each.clone() for name, each in tensors.items()}), torch.device("cpu")
    )
    new = states(1, 25)
    for each in (layer, copied, loaded):
        feed_in(each, *new, [1] * 5 + [20])
    assert torch.equal(layer.to_dense("keys"), copied.to_dense("keys"))
    assert torch.equal(layer.to_dense("values"), loaded.to_dense("values"))
    assert measured(layer) == measured(loaded) == measured(copied)


def measured(layer):
    return sum(tensor.nbytes for name, tensor in layer.named_tensors() if name == "scales")


def test_sequences_of_a_batch_are_selected_with_their_tables():
    layer = make_layer()
    feed_in(layer, *states(3, 380), [80, 300])
    before = layer.to_dense("keys")
    layer.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(layer.to_dense("keys"), before[[2, 0, 1]])


def test_padded_batches_are_fitted_again_once_all_have_a_table():
    layer = make_layer()
    feed(layer, *states(2, 150), padding=[0, 100])
    feed(layer, *states(2, 10), padding=[0, 100])
    assert layer._unfitted_sequences is not None
    feed(layer, *states(2, 460), padding=[0, 100])
    assert layer._unfitted_sequences is None
    feed(layer, *states(2, 40), padding=[0, 100])
    assert layer.codec.fitted_length == 660 and layer.storage.segments[0].codec is not None
    output = feed(layer, *states(2, 1), padding=[0, 100], query=torch.randn(2, NUM_HEADS * 2, 1, HEAD_DIM))
    assert bool(output.isfinite().all())


def test_a_padded_sequence_is_fitted_again_when_it_is_alone():
    alone, padded = make_layer(), make_layer()
    keys, values = states(1, 390)
    # Padding of a sequence that is the whole batch is no part of its length
    feed_in(alone, keys, values, [80, 239, 71])
    start = states(1, 200)
    own_keys, own_values = (torch.cat(each, dim=2) for each in zip(start, (keys, values), strict=True))
    for stop, size in ((280, 280), (519, 239), (590, 71)):
        feed(padded, own_keys[:, :, stop - size : stop], own_values[:, :, stop - size : stop], padding=[200])
    assert alone.codec.fitted_length == padded.codec.fitted_length == 390
    assert lengths_of(alone) == lengths_of(padded)


def test_recent_rows_of_padded_sequences_keep_their_states():
    layer, padding = make_layer(), [9, 0]
    feed(layer, *states(2, 80), padding=padding)
    feed(layer, *states(2, 230), padding=padding)
    first = layer.codec
    while layer.codec is first:
        before = layer.to_dense("keys")
        feed(layer, *states(2, 1), padding=padding)
    recent = layer.storage.segments[-1]
    assert recent.is_recent and recent.start < before.shape[2] - CONFIG.residual_length
    newest = slice(recent.start, before.shape[2])
    error = (layer.to_dense("keys")[:, :, newest] - before[:, :, newest]).square().mean(dim=(1, 2, 3))
    assert bool((error < 0.01 * before[:, :, newest].square().mean(dim=(1, 2, 3))).all())


def test_padding_is_no_part_of_a_later_fit():
    layer, (keys, values) = make_layer(), states(2, 610)
    for side in (keys, values):
        side[1, :, :70] *= 100
    for tokens in (slice(150), slice(150, 610)):
        feed(layer, keys[:, :, tokens], values[:, :, tokens], padding=[0, 70])
    assert layer.codec.fitted_length == 610
    for side_format in layer.codec.formats():
        whole, padded = side_format.deviation.float().mean(dim=(1, 2))
        assert padded < 2 * whole


def test_tokens_before_the_newest_2048_are_no_part_of_a_later_fit():
    layer, (keys, values) = make_layer(), states(1, 2450)
    for side in (keys, values):
        side[:, :, :400] *= 100
    feed_in(layer, keys, values, [600, 1850])
    assert layer.codec.fitted_length == 2450
    assert all(side_format.deviation.mean() < 2 for side_format in layer.codec.formats())


def test_forged_tables_of_blocks_are_refused():
    layer = make_layer()
    feed_in(layer, *states(1, 380), [80, 300])
    state, tensors = pack(layer.state())
    state["blocks"][0]["tables"], state["blocks"][1]["tables"] = None, state["blocks"][0]["tables"]
    moved = {name.replace("blocks.0.tables", "blocks.1.tables"): each for name, each in tensors.items()}
    with pytest.raises(ValueError, match="no other rows behind it"):
        make_layer().restore(unpack(LayerState, state, moved), torch.device("cpu"))


def test_forks_share_older_rows_and_tables():
    cache = TransformCodingCache(residual_length=8)
    cache.layers.append(layer := cache._next_layer())
    feed_in(layer, *states(1, 380), [80, 300])
    (fork,) = cache.fork(1)
    other = fork.layers[0]
    table = next(layer.storage.segments[0].codec.tensors())
    assert next(other.storage.segments[0].codec.tensors()).data_ptr() == table.data_ptr()
    before = layer.to_dense("keys")
    feed(other, *states(1, 1600))
    assert other.codec.fitted_length == 1980
    assert torch.equal(layer.to_dense("keys"), before)


def test_gear_chunks_do_not_depend_on_earlier_text():
    """Chunks of GEAR have scales of their own: what was read before changes none of them."""
    new, segments = other_kind(320), []
    for before in (states(1, 320), other_kind(320)):
        cache = GEARCache(nbits=4)
        cache.layers.append(layer := cache._next_layer())
        feed_in(layer, *(torch.cat(each, dim=2) for each in zip(before, new, strict=True)), [320, 320])
        segments.append(layer.storage.segments[-1])
    for mine, theirs in zip(segments[0].stored(), segments[1].stored(), strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
