"""Layers whose attention has a window: equal to Transformers' own sliding layer but for the codes, and bounded."""

import pytest
import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins.contract.comparison import reachable_bytes
from kvcache_plugins.contract.subject import RECORDS_PAST
from kvcache_plugins.gear import GEARCache


NUM_HEADS, HEAD_DIM, CHUNK = 2, 32, 8


def make_layer(window):
    return GEARCache(nbits=8, backbone="transform", sliding="compressed")._layer(0, None, window)


def states(batch_size, length):
    return tuple(torch.randn(batch_size, NUM_HEADS, length, HEAD_DIM) for _ in range(2))


def window_mask(layer, window, num_new, padding):
    """Makes the mask that Transformers makes of the sizes that a layer announces."""
    length, first = layer.get_mask_sizes(num_new)
    queries = torch.arange(layer.get_seq_length(), layer.get_seq_length() + num_new)[:, None]
    tokens = torch.arange(first, first + length)
    seen = (tokens <= queries) & (tokens > queries - window)
    return seen & (tokens >= torch.tensor(padding)[:, None, None, None])


def attend(layer, new, query, mask):
    keys, values = layer.update(*new)
    assert keys.shape[2] == values.shape[2] == mask.shape[3]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def feed(layers, window, num_new, padding, what):
    """Attends over all layers, the first of which says what the output has to be."""
    new = states(len(padding), num_new)
    query = torch.randn(len(padding), 2 * NUM_HEADS, num_new, HEAD_DIM)
    outputs = []
    for layer in layers:
        outputs.append(attend(layer, new, query, window_mask(layer, window, num_new, padding)))
    positions = torch.arange(layers[0].get_seq_length() - num_new, layers[0].get_seq_length())
    is_real = (positions >= torch.tensor(padding)[:, None])[:, None, :, None]
    for output in outputs[1:]:
        error = ((output - outputs[0]) * is_real).nan_to_num().abs().max()
        assert error < 0.03, f"{what}: {error}"


@pytest.mark.parametrize(("window", "padding"), [(70, (0, 0)), (80, (0, 37)), (97, (90, 3))], ids=str)
def test_attention_is_that_of_the_dense_sliding_layer(window, padding):
    torch.manual_seed(0)
    own = make_layer(window)
    # Prompts below, at and beyond the window, then every offset of a window against a chunk, several tokens at once,
    # and a later prompt
    for prompt in (45, 200):
        own.reset()
        layers = DynamicSlidingWindowLayer(sliding_window=window), own
        for step, num_new in enumerate((prompt, *[1] * 17, 5, 1, 40, 3, 150, *[1] * 20)):
            feed(layers, window, num_new, padding, f"prompt {prompt}, step {step}")
    assert layers[1].stats()["tokens_compressed"] > 0 and layers[1].dense_reads == 0
    for side in ("keys", "values"):
        expected = getattr(layers[0], side)
        dense = layers[1].materialize(side)[:, :, -expected.shape[2] :]
        assert (dense - expected).abs().max() < 0.1


def test_memory_is_bounded_and_counted():
    window = 70
    layer = make_layer(window)
    feed([layer], window, 300, (0, 0), "prompt")
    sizes, spare = [], 0
    for _ in range(160):
        feed([layer], window, 1, (0, 0), "step")
        named = list(layer.named_tensors())
        sizes.append(sum(tensor.nbytes for _, tensor in named))
        spare = max(spare, sum(tensor.nbytes for part, tensor in named if part == "spare"))
        assert sizes[-1] == reachable_bytes(layer)
        held = sum(block.length for block in layer.blocks)
        assert held <= window - 1 + 64 + CHUNK
    assert max(sizes[100:]) <= max(sizes[:100]) and spare <= max(sizes) // 5
    assert layer.prefix is None and layer.num_values() == 2 * 2 * NUM_HEADS * (window - 1) * HEAD_DIM


@pytest.mark.skipif(not RECORDS_PAST, reason="the dense layer of this release cannot be rolled back")
def test_rollback():
    torch.manual_seed(2)
    window, padding = 70, (0, 9)
    layers = DynamicSlidingWindowLayer(sliding_window=window), make_layer(window)
    feed(layers, window, 120, padding, "prompt")
    for layer in layers:
        layer.activate_past_recording()
    for step, (drafted, rejected) in enumerate([(6, 4), (6, 0), (9, 9), (5, 1), (30, 29)] * 6):
        for num_new in (1, drafted - 1):
            feed(layers, window, num_new, padding, f"round {step}")
        for layer in layers:
            layer.crop(-rejected)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()
    feed(layers, window, 1, padding, "at last")
    assert layers[1]._held_start > 0


def test_newest_update_can_be_taken_back_and_more_is_refused():
    window = 70
    layer = make_layer(window)
    feed([layer], window, 200, (0, 0), "prompt")
    with pytest.raises(ValueError, match=r"`crop` of 20 tokens.*`activate_past_recording\(\)`"):
        layer.crop(-20)
    for _ in range(30):
        feed([layer], window, 4, (0, 0), "step")
        layer.crop(-4)
        feed([layer], window, 3, (0, 0), "step")
    with pytest.raises(ValueError, match="a window of 70 tokens has let go"):
        layer.crop(-90)
    assert layer.get_seq_length() == 290
    layer.crop(-290)
    assert layer.get_seq_length() == 0
    feed([layer], window, 20, (0, 0), "anew")
