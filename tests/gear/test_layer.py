"""When a GEAR layer compresses what, and that what it attends to is what it holds."""

import pytest
import torch
import torch.nn.functional as F
from feeding import HEAD_DIM, NUM_HEADS, feed, states

from kvcache_plugins.contract.comparison import reachable_bytes
from kvcache_plugins.gear import GEARCache
from kvcache_plugins.layers.group_layer import GroupLayer


GROUP = 64
METHODS = {
    "gear-4bit": {"nbits": 4},
    "gear-2bit": {"nbits": 2},
    "gear-l-2bit": {"nbits": 2, "sparsity": 0},
    "kivi-2bit": {"nbits": 2, "sparsity": 0, "rank": 0},
    "per-token-3bit": {"nbits": 3, "backbone": "per-token"},
    "kcvt-8bit": {"nbits": 8, "rank": 0},
    "sinks": {"nbits": 3, "backbone": "kivi", "sparsity": 0, "rank": 0, "num_sink_tokens": 4, "rotate_values": True},
    "sinks-beyond-a-group": {"nbits": 2, "num_sink_tokens": 70, "rotate_values": True},
    "mixed": {"key_nbits": 4, "value_nbits": 2, "decode_rank": 0},
}


def make_layer(**options) -> GroupLayer:
    return GEARCache(**options)._next_layer()


def decode(layer, count):
    for _ in range(count):
        feed(layer, *states(layer.batch_size, 1, layer.dtype))


@pytest.mark.parametrize("length", [1, GROUP - 1, GROUP, GROUP + 1, 200, 1024, 1100])
@pytest.mark.parametrize("method", METHODS)
def test_prompt_is_compressed_right_after_its_attention(method, length):
    layer = make_layer(**METHODS[method])
    feed(layer, *states(2, length))
    parts = {part: tensor for part, tensor in layer.named_tensors() if tensor.numel()}
    if length < GROUP:
        assert "codes" not in parts
        assert layer.stats()["tokens_compressed"] == 0
    else:
        whole = length - length % GROUP if layer.policy.has_whole_groups else length
        assert layer.stats()["tokens_compressed"] == whole
        exact = max(length - whole, min(layer.policy.num_sink_tokens, length))
        assert layer.stats()["tokens_exact"] == exact
    assert layer.get_seq_length() == length
    assert layer.get_mask_sizes(3) == (length + 3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_attention_equals_attention_over_the_dense_states(method, dtype):
    layer = make_layer(**METHODS[method], residual_length=32)
    feed(layer, *states(2, 150, dtype=dtype), padding=[0, 60])
    decode(layer, 75)
    for num_queries in (1, 3):
        keys, values = layer.update(*states(2, num_queries, dtype=dtype))
        mask = torch.ones(2, 1, num_queries, layer.get_seq_length(), dtype=torch.bool)
        mask[1, :, :, :60] = False
        mask[:, :, 0, -1] = num_queries == 1
        query = torch.randn(2, NUM_HEADS * 2, num_queries, HEAD_DIM).to(dtype)
        expected = F.scaled_dot_product_attention(
            query.float(),
            layer.to_dense("keys").float(),
            layer.to_dense("values").float(),
            attn_mask=mask,
            enable_gqa=True,
        )
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        # C kernels make words of 16 bits of queries and weights
        tolerance = 5e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(output.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("padding", [None, [0, 1, 63, 100]])
@pytest.mark.parametrize("backbone", ["kcvt", "kivi", "per-token"])
def test_sink_tokens_are_exact_and_widen_no_range(backbone, padding):
    options = {"nbits": 3, "backbone": backbone, "rotate_values": True, "rank": 0, "sparsity": 0}
    keys, values = states(4, 256)
    starts = padding or [0] * 4
    for item, start in enumerate(starts):
        keys[item, :, start : start + 4] *= 100
        values[item, :, start : start + 4] *= 100
    errors = {}
    for num_sink_tokens in (0, 4):
        layer = make_layer(**options, num_sink_tokens=num_sink_tokens)
        feed(layer, keys, values, padding=padding)
        for side, exact in (("keys", keys), ("values", values)):
            dense = layer.to_dense(side)
            for item, start in enumerate(starts):
                assert num_sink_tokens == 0 or torch.equal(
                    dense[item, :, start : start + 4], exact[item, :, start : start + 4]
                )
            # Error of the sequence without padding, behind the sinks
            errors[side, num_sink_tokens] = (dense - exact)[0, :, 4:].square().mean()
    # Tokens have their own ranges of values, and groups of tokens theirs of keys
    assert backbone == "per-token" or errors["keys", 4] < 0.5 * errors["keys", 0]
    assert errors["values", 4] <= errors["values", 0] * (1 + 1e-6)


def test_rotation_spreads_an_outlier_channel():
    keys, values = states(1, 128)
    values[..., 3] *= 30
    errors = []
    for rotate_values in (False, True):
        layer = make_layer(
            nbits=2, backbone="kivi", rank=0, sparsity=0, rotate_values=rotate_values, q_group_size=HEAD_DIM
        )
        feed(layer, keys, values)
        errors.append((layer.to_dense("values") - values).square().mean())
    assert errors[1] < 0.7 * errors[0]


def test_refused_first_prompt_leaves_an_empty_layer():
    layer, (keys, values) = make_layer(**METHODS["sinks"]), states(1, 2 * GROUP)
    with pytest.raises(ValueError, match="layer 0: the states exceed the range of float16"):
        feed(layer, keys, 1e6 * values)
    assert layer.get_seq_length() == 0 and not list(layer.named_tensors())


@pytest.mark.parametrize("residual_length", [20, 64])
@pytest.mark.parametrize("backbone", ["kcvt", "kivi", "per-token"])
def test_each_token_is_compressed_once_and_history_never_changes(residual_length, backbone):
    layer = make_layer(nbits=2, backbone=backbone, residual_length=residual_length)
    feed(layer, *states(1, 128))
    before = layer.to_dense("keys")[:, :, :100].clone()
    decode(layer, 5 * residual_length + 1)
    # Tokens of the prompt that do not fill a group stay exact
    exact_prefix = 128 % layer.policy.least_tokens if backbone == "kivi" else 0
    assert layer.stats()["tokens_compressed"] == 128 - exact_prefix + 5 * residual_length
    assert layer.stats()["chunks_compressed"] == 6
    assert torch.equal(layer.to_dense("keys")[:, :, :100], before)


def test_growth_copies_rarely():
    layer = make_layer(nbits=2, residual_length=16)
    feed(layer, *states(1, 64))
    addresses = set()
    for _ in range(64 * 16):
        decode(layer, 1)
        if len(layer.storage.segments) > 1:
            addresses.add(layer.storage.segments[1].keys.codes.data_ptr())
    # Capacity doubles: 63 chunks need 7 allocations, not 63
    assert layer.storage.segments[1].num_chunks == 63
    assert layer.storage.segments[1].keys.num_chunks == 64
    assert len(addresses) <= 7
    # Capacity that is not in use is memory too
    assert sum(tensor.nbytes for _, tensor in layer.named_tensors()) == reachable_bytes(layer)


def test_a_long_later_update_is_compressed_like_a_prompt():
    layer = make_layer(nbits=2)
    feed(layer, *states(1, 128))
    decode(layer, 10)
    assert feed(layer, *states(1, 300)).isfinite().all()
    assert [block.length for block in layer.storage.segments] == [128, 256]
    assert layer.storage.tail.length == 310 - 256
    decode(layer, 100)
    assert layer.stats()["tokens_compressed"] == 128 + 256 + 128


def test_padding_that_spans_several_updates_enters_no_range():
    keys, values = states(2, 512)
    spoiled = [side.clone() for side in (keys, values)]
    for side in spoiled:
        side[1, :, :400] *= 1000

    def in_two_updates(keys, values):
        layer = make_layer(nbits=2)
        for new in (slice(0, 256), slice(256, 512)):
            feed(layer, keys[:, :, new], values[:, :, new], [0, 400])
        return layer.to_dense("keys")

    assert torch.equal(in_two_updates(keys, values)[1, :, 400:], in_two_updates(*spoiled)[1, :, 400:])


@pytest.mark.parametrize("padding", [None, [3, 0]])
@pytest.mark.parametrize("count", [0, 1, 5])
@torch.no_grad()
def test_cropped_short_prompt_packs_as_a_shorter_one(count, padding):
    """A sequence packs `residual_length` tokens behind what is left of its prompt, padded or not."""
    layer, other = make_layer(nbits=2, residual_length=16), make_layer(nbits=2, residual_length=16)
    feed(layer, *states(2, 12), padding=padding)
    layer.crop(-count)
    feed(other, *states(2, 12 - count), padding=padding)
    for number in range(40):
        decode(layer, 1)
        decode(other, 1)
        held = [[(each.start, each.length) for each in one.storage.segments] for one in (layer, other)]
        assert held[0] == held[1], number
        assert layer.storage.tail_length == other.storage.tail_length
    assert held[0]


@pytest.mark.each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 10, 40, 100, 190, 270, 290, 300])
def test_cropped_tokens_have_no_effect(method, count):
    layer = make_layer(**METHODS[method], residual_length=32)
    feed(layer, *states(2, 200), padding=[0, 60])
    decode(layer, 100)
    dense = {side: layer.to_dense(side) for side in ("keys", "values")}
    stored = sum(tensor.nbytes for _, tensor in layer.named_tensors())
    layer.crop(-count)
    assert layer.get_seq_length() == 300 - count
    for side, before in dense.items():
        assert torch.equal(layer.to_dense(side), before[:, :, : 300 - count])
    assert sum(tensor.nbytes for _, tensor in layer.named_tensors()) <= stored
    if count < 300:
        after = [tensor.clone() for tensor in states(2, 1)]
        keys, values = layer.update(*after)
        assert torch.equal(keys.densify()[:, :, -1:], after[0])
        decode(layer, 70)
        # The last 4 of the 300 tokens were still exact, and are compressed only now
        kept = min(300 - count, 296)
        assert torch.equal(layer.to_dense("keys")[:, :, :kept], dense["keys"][:, :, :kept])
