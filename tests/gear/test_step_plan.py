"""Attention of token after token by one plan equals attention that is planned anew for every token."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import needs_triton
from transformers import LlamaConfig

from kvcache_plugins.kernels.attention import attend as kernel_attend
from kvcache_plugins.kernels.compiled import PreparedCall
from kvcache_plugins.layers.phase import Phase
from kvcache_plugins.registry import create_cache, parse_cache_spec


HEADS, GROUPS, DIM, PROMPT = 2, 3, 32, 70
PRESETS = {
    "gear-k4v3": 100,
    "gear-2bit": 100,
    "transform": 200,
    "transform:recent_length=64": 100,
    "transform:recent_length=0": 50,
    # More tokens are coded at a time than one call takes
    "transform:recent_length=200,residual_length=100": 250,
    "kcvt-4bit": 100,
}


def make_layer(preset):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": HEADS * GROUPS, "num_key_value_heads": HEADS}
    config = LlamaConfig(hidden_size=HEADS * GROUPS * DIM, head_dim=DIM, **sizes)
    name, options = parse_cache_spec(preset)
    return create_cache(name, config, **options).layers[0]


def tokens(count, dtype=torch.float32, batch_size=1):
    return [torch.randn(batch_size, HEADS * (GROUPS if i == 0 else 1), count, DIM).to(dtype) for i in range(3)]


def attend(layer, query, keys, values, mask=None):
    states = layer.update(keys, values)
    return F.scaled_dot_product_attention(
        query, *states, attn_mask=mask, is_causal=query.shape[2] > 1, enable_gqa=True
    )


def two_filled(preset, count=PROMPT, dtype=torch.float32, batch_size=1):
    """Two layers that have attended to the same prompt."""
    layers, prompt = (make_layer(preset), make_layer(preset)), tokens(count, dtype, batch_size)
    for layer in layers:
        attend(layer, *prompt)
    return layers


def attend_anew(layer, query, keys, values):
    """Attends with nothing prepared."""
    states = layer.update(keys, values)
    layer.plan = None
    return F.scaled_dot_product_attention(query, *states, enable_gqa=True)


def note_lengths(kind, monkeypatch):
    """List lengths of the tail with which planned calls of a kind have answered."""
    lengths, original = [], kind.attend

    def noting(self, query, scale=None, tail=None):
        output = original(self, query, scale, tail)
        if output is not None and tail is not None:
            lengths.append(tail.length)
        return output

    monkeypatch.setattr(kind, "attend", noting)
    return lengths


@pytest.fixture
def calls(monkeypatch):
    return note_lengths(PreparedCall, monkeypatch)


@pytest.mark.each_value
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_a_reused_plan_equals_new_plans(preset, dtype, batch_size, calls):
    first, second = two_filled(preset, PROMPT, dtype, batch_size)
    steps = PRESETS[preset]
    for _ in range(steps):
        token = tokens(1, dtype, batch_size)
        assert torch.equal(attend(first, *token), attend_anew(second, *token))
    assert len(calls) > steps / 2
    assert first.stats()["fused_calls"] == second.stats()["fused_calls"] == steps


@needs_triton
@pytest.mark.parametrize(
    ("preset", "most"), [("gear-2bit:residual_length=4", 4), ("gear-k4v3:num_sink_tokens=3,residual_length=9", 9)]
)
@torch.no_grad()
def test_a_reused_triton_plan_equals_new_plans(preset, most, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    from kvcache_plugins.kernels.triton import KeptAttention

    lengths = note_lengths(KeptAttention, monkeypatch)
    first, second = two_filled(preset, 19, torch.float16)
    for step in range(most + 2):
        query, keys, values = tokens(1, torch.float16)
        if step == 2:
            first, original = copy.deepcopy(first), first
            attend(original, *tokens(1, torch.float16))
        states, _ = first.update(keys, values), second.update(keys, values)
        for scale in (None, 0.5) if step == most else (None,):
            expected = kernel_attend(query, second._parts(None), HEADS, scale, "triton")
            found = F.scaled_dot_product_attention(query, *states, scale=scale, enable_gqa=True)
            assert torch.equal(found, expected)
    # Beyond the room that the buffer had, and after it was packed
    assert {1, most} <= set(lengths) and lengths.count(1) >= 2


@pytest.mark.parametrize("preset", ["gear-k4v3", "transform"])
@torch.no_grad()
def test_copies_and_rollbacks_make_new_plans(preset, calls):
    layer, reference = two_filled(preset)
    for step in range(40):
        token = tokens(1)
        if step == 10:
            layer, original = copy.deepcopy(layer), layer
            attend(original, *tokens(1))
        # Crop some of the newest tokens, then packed ones too
        for count in {20: [2], 24: [60]}.get(step, []):
            layer.crop(-count)
            reference.crop(-count)
        if step == 30:
            layer.batch_repeat_interleave(2)
            reference.batch_repeat_interleave(2)
        if step >= 30:
            token = [torch.cat([states, -states]) for states in token]
        mask = None
        if step % 7 == 3:
            mask = torch.ones(1, 1, 1, layer.get_seq_length() + 1, dtype=torch.bool)
            mask[..., 5] = False
        expected = attend(reference, *token, mask) if mask is not None else attend_anew(reference, *token)
        assert torch.equal(attend(layer, *token, mask), expected)
    assert calls


@torch.no_grad()
def test_a_plan_of_another_version_packs_nothing():
    """The first tokens are packed without it, and attention under a mask makes no new one."""
    layer, reference = two_filled("transform")
    for step in range(25):
        token = tokens(1)
        mask = None
        if step >= 2:
            mask = torch.ones(1, 1, 1, layer.get_seq_length() + 1, dtype=torch.bool)
            mask[..., 5] = False
        reference.plan = None
        assert torch.equal(attend(layer, *token, mask), attend(reference, *token, mask))
    assert layer.plan is not None and layer.plan.version < layer.storage.version


@pytest.mark.parametrize("preset", ["gear-k4v3", "transform:residual_length=20"])
@torch.no_grad()
def test_unwritten_token_is_seen_by_every_reader(preset, calls):
    layer, reference = two_filled(preset)
    token = tokens(1)
    for each in (layer, reference):
        attend(each, *token)
    for step in range(8):
        query, keys, values = tokens(1)
        layer.update(keys, values)
        assert layer.storage.tail.unwritten is not None
        newest = layer.to_dense("keys")[:, :, -1:] if step % 2 else None
        attend_anew(reference, query, keys, values)
        # The first of two tokens in turn was not attended to
        token = tokens(1)
        expected = attend_anew(reference, *token)
        assert torch.equal(attend(layer, *token), expected)
        assert newest is None or torch.equal(newest, keys)
        assert layer.storage.tail.unwritten is None
    assert calls


@torch.no_grad()
def test_other_queries_and_thread_counts_make_new_plans(calls):
    layer, _ = two_filled("gear-k4v3")
    attend(layer, *tokens(1))
    attend(layer, *tokens(1))
    assert len(calls) == 2
    plans = [layer.plan]
    query, keys, values = tokens(1)
    attend(layer, torch.cat([query, query], dim=1), keys, values)
    plans.append(layer.plan)
    states = layer.update(keys, values)
    F.scaled_dot_product_attention(query, *states, scale=0.5, enable_gqa=True)
    plans.append(layer.plan)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads + 1)
        attend(layer, query, keys, values)
        plans.append(layer.plan)
    finally:
        torch.set_num_threads(num_threads)
    # Each is planned anew, and answers
    assert len(calls) == 5 and len(set(plans)) == 4


@torch.no_grad()
def test_plan_writes_only_a_token_of_its_shape_and_dtype(calls):
    layer, _ = two_filled("transform")
    attend(layer, *tokens(1))
    plan, tail = layer.plan, layer.storage.tail
    query, keys, values = tokens(1)
    wide = torch.cat([values, values], dim=3)[..., ::2]
    others = [(keys.bfloat16(), values.bfloat16()), (keys, values.half()), (keys, wide), (keys[:, :1], values[:, :1])]
    others += [(keys.to("meta"), values.to("meta")), (torch.cat([keys, keys]), torch.cat([values, values]))]
    length, tail.length = tail.length, tail.length + 1
    for newest in others:
        tail.unwritten = newest
        with pytest.raises(ValueError, match="the newest token has to be"):
            plan.attend(query, None, tail)
    tail.unwritten = keys, values
    tail.length = 0
    with pytest.raises(ValueError, match="the newest token has to be"):
        plan.attend(query, None, tail)
    tail.length = tail.capacity + 1
    with pytest.raises(ValueError, match="tokens in use"):
        plan.attend(query, None, tail)
    tail.length = length + 1
    storage = tail.storage
    tail.storage = tuple(states.double() for states in storage)
    with pytest.raises(ValueError, match="when the call was prepared"):
        plan.attend(query, None, tail)
    tail.storage = storage
    assert plan.attend(query, None, tail) is not None and tail.unwritten is None


@torch.no_grad()
def test_only_contiguous_tokens_wait_for_attention():
    layer, reference = two_filled("transform")
    attend(layer, *(first := tokens(1)))
    attend_anew(reference, *first)
    plan = layer.plan
    for is_contiguous in (True, False, True):
        query, keys, values = tokens(1)
        own = values if is_contiguous else torch.cat([values, values], dim=3)[..., ::2]
        expected = attend_anew(reference, query, keys, own.contiguous())
        states = layer.update(keys, own)
        assert (layer.storage.tail.unwritten is not None) == is_contiguous
        assert torch.equal(F.scaled_dot_product_attention(query, *states, enable_gqa=True), expected)
    assert layer.plan is plan


@pytest.mark.parametrize("preset", ["gear-k4v3", "transform"])
def test_inference_mode_and_gradients_may_alternate(preset):
    layer, reference = make_layer(preset), make_layer(preset)
    for start, count in enumerate([5, *[1] * 100]):
        given = tokens(count)
        with torch.no_grad():
            expected = attend(reference, *given)
        with (torch.inference_mode, torch.no_grad, torch.enable_grad)[start // 5 % 3]():
            # Make new tensors in this mode, as a model does
            found = attend(layer, *(states + 0 for states in given))
        # Dense attention and that of the layer round differently
        torch.testing.assert_close(found, expected)
    assert layer.stats()["tokens_compressed"] == reference.stats()["tokens_compressed"] > 0
    layer.crop(-1)
    assert torch.equal(layer.to_dense("keys"), reference.to_dense("keys")[:, :, :-1])


@pytest.mark.parametrize("preset", ["gear-k4v3", "transform"])
@torch.no_grad()
def test_readers_do_not_end_the_dense_phase(preset):
    layer, reference = make_layer(preset), make_layer(preset)
    for step, given in enumerate([tokens(5), *(tokens(1) for _ in range(40))]):
        expected, found = attend(reference, *given), attend(layer, *given)
        assert torch.equal(found, expected)
        if step % 8 == 3:
            assert layer.phase is Phase.DENSE
            held = {part: tensor.shape for part, tensor in layer.named_tensors()}
            assert torch.equal(layer.to_dense("values"), reference.to_dense("values"))
            assert layer.phase is Phase.DENSE
            assert held == {part: tensor.shape for part, tensor in layer.named_tensors()}
        if step == 20:
            layer = copy.deepcopy(layer)
        if step == 30:
            layer.crop(-3)
            reference.crop(-3)
    wrong = [torch.randn(1, HEADS + 1, 1, DIM) for _ in range(2)]
    with pytest.raises(ValueError, match="another model"):
        layer.update(*wrong)


@pytest.mark.parametrize("number", [float("nan"), 1e30])
@torch.no_grad()
def test_plan_refuses_tokens_that_overflow(number):
    layer, _ = two_filled("transform")
    for _ in range(20):
        attend(layer, *tokens(1))
    assert layer.plan._encoder is not None
    length = layer.storage.segments[-1].length
    held = [
        side[:, :, :length].clone() for side in (layer.storage.segments[-1].keys, layer.storage.segments[-1].values)
    ]
    query, keys, values = tokens(1)
    values[0, 1, 0, 3] = number
    attend(layer, query, keys, values)
    with pytest.raises(ValueError, match="layer 0: "):
        for _ in range(10):
            attend(layer, *tokens(1))
    now = [side[:, :, :length] for side in (layer.storage.segments[-1].keys, layer.storage.segments[-1].values)]
    assert all(map(torch.equal, held, now))
    layer.crop(-layer.storage.tail.length)
    for _ in range(10):
        attend(layer, *tokens(1))
