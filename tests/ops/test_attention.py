"""Every kernel against dense attention in float64 over what a GEAR layer really holds."""

import warnings

import pytest
import torch

from kvcache_plugins import GEARCache
from kvcache_plugins.codecs.parts import CompressedPart
from kvcache_plugins.kernels import engine, library
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import slice_mask


KERNELS = ["torch", "compiled", "triton"]
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 5e-3}
SINKS = {"nbits": 2, "num_sink_tokens": 4, "rotate_values": True, "rank": 0, "sparsity": 0.0}
# Items, key/value heads, groups, head dim, prompt, decoded tokens, new tokens, options
CASES = {
    "one token beyond a group": (1, 2, 1, 64, 65, 0, 1, {"nbits": 2}),
    "a token short of two groups": (1, 1, 3, 64, 127, 1, 1, {"nbits": 4}),
    "many decode chunks": (1, 2, 4, 32, 129, 330, 1, {"nbits": 2}),
    "batch of three, eight a group": (3, 2, 8, 32, 200, 70, 1, {"nbits": 4}),
    "several new tokens": (2, 1, 4, 64, 150, 70, 7, {"nbits": 2}),
    "sixteen new tokens": (1, 2, 3, 32, 100, 20, 16, {"nbits": 2, "backbone": "per-token"}),
    "long": (1, 1, 3, 64, 1000, 0, 1, {"nbits": 2}),
    "3 bits, odd head dim": (1, 2, 3, 20, 130, 70, 1, {"nbits": 3, "q_group_size": 10, "residual_length": 20}),
    "8 bits, per token": (1, 2, 4, 80, 100, 70, 1, {"nbits": 8, "backbone": "per-token"}),
    "no low rank": (1, 2, 4, 96, 130, 0, 1, {"nbits": 2, "rank": 0}),
    "no outliers": (2, 2, 3, 64, 130, 70, 1, {"nbits": 2, "sparsity": 0.0}),
    "backbone alone": (1, 1, 1, 128, 130, 0, 1, {"nbits": 4, "backbone": "kivi", "sparsity": 0.0, "rank": 0}),
    "low rank of recent tokens": (1, 2, 2, 64, 200, 0, 1, {"nbits": 2, "low_rank_recent_ratio": 0.3}),
    "different keys and values": (1, 2, 4, 64, 130, 70, 1, {"key_nbits": 3, "value_nbits": 2, "value_rank": 0}),
    "group that tiles do not divide": (1, 2, 3, 64, 300, 0, 1, {"nbits": 2, "q_group_size": 32, "rank": 3}),
    "rotated, sinks in the first group": (2, 2, 3, 64, 192, 70, 1, {**SINKS, "key_nbits": 3}),
    "rotated, sinks beyond the first group": (1, 2, 4, 96, 200, 0, 7, {**SINKS, "rank": 2, "sparsity": 0.05}),
    "one group a channel, many outliers": (1, 2, 3, 64, 300, 0, 1, {"nbits": 4, "sparsity": 0.3}),
}


def filled_layer(case, dtype=torch.float32, padding=None):
    batch_size, num_heads, _, head_dim, prompt, num_decoded, _, options = case
    cache = GEARCache(**options)
    scale = torch.rand(num_heads, 1, head_dim) * 3
    offset = torch.randn(num_heads, 1, head_dim)

    def states(length):
        return (torch.randn(batch_size, num_heads, length, head_dim) * scale + offset).to(dtype)

    cache.update(states(prompt), states(prompt), 0)
    layer = cache.layers[0]
    if padding is not None:
        layer.padding, layer._mask_seen = torch.tensor(padding), True
    layer.settle_prompt()
    for _ in range(num_decoded):
        cache.update(states(1), states(1), 0)
    return layer


def padding_mask(padding, length):
    return (torch.arange(length) >= torch.tensor(padding)[:, None])[:, None, None, :]


def reference_attention(query, parts, num_heads):
    """Softmax over everything at once, in float64."""
    keys, values, masks = [], [], []
    for part in parts:
        tiles = list(part.tiles())
        keys += [tile[0].double() for tile in tiles]
        values += [tile[1].double() for tile in tiles]
        shape = (query.shape[0], query.shape[1], query.shape[2], part.length)
        mask = torch.zeros(shape, dtype=torch.double)
        columns = slice_mask(part.mask, 0, part.length)
        if columns is not None and columns.dtype == torch.bool:
            mask.masked_fill_(~columns.expand(shape), -torch.inf)
        elif columns is not None:
            mask += columns
        masks.append(mask)
    groups = query.shape[1] // num_heads
    keys, values = (torch.cat(states, dim=2).repeat_interleave(groups, dim=1) for states in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * query.shape[3] ** -0.5 + torch.cat(masks, dim=3)
    return scores.softmax(dim=-1).nan_to_num() @ values


def relative_error(output, expected):
    return ((output.double() - expected).square().mean() / expected.square().mean()).sqrt().item()


def check(case, kernel, dtype=torch.float32, mask=None, padding=None):
    layer = filled_layer(case, dtype, padding)
    batch_size, num_heads, groups, head_dim, *_, num_queries, _ = case
    query = torch.randn(batch_size, num_heads * groups, num_queries, head_dim).to(dtype)
    if mask == "additive":
        mask = torch.randn(batch_size, 1, num_queries, layer.get_seq_length())
    elif mask == "causal":
        mask = torch.ones(num_queries, layer.get_seq_length()).tril(layer.get_seq_length() - num_queries).bool()
    elif mask == "padding":
        mask = padding_mask(padding, layer.get_seq_length())
    parts = list(layer._parts(mask))
    assert any(isinstance(part, CompressedPart) for part in parts)
    output = attend(query, parts, num_heads, kernel=kernel)
    assert output.dtype == dtype
    assert relative_error(output, reference_attention(query, parts, num_heads)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name, kernel):
    check(CASES[name], kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["several new tokens", "no outliers"])
def test_matches_float64_in_half_precision(name, dtype, kernel):
    check(CASES[name], kernel, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", ["additive", "causal"])
def test_masks(mask, kernel):
    check(CASES["several new tokens"], kernel, mask=mask)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("padding", [[0, 30, 199], [5, 70, 150]])
def test_left_padding(padding, kernel):
    check(CASES["batch of three, eight a group"], kernel, mask="padding", padding=padding)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_may_attend_to_nothing_gets_zero(kernel):
    layer = filled_layer(CASES["no outliers"])
    mask = torch.ones(2, 1, 1, layer.get_seq_length(), dtype=torch.bool)
    mask[1] = False
    output = attend(torch.randn(2, 6, 1, 64), layer._parts(mask), 2, kernel=kernel)
    assert output[0].isfinite().all()
    assert (output[1] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_do_not_touch_each_other(kernel):
    layer = filled_layer(CASES["batch of three, eight a group"])
    query = torch.randn(3, 16, 1, 32)
    output = attend(query, layer._parts(None), 2, kernel=kernel)
    query[1] = torch.randn(16, 1, 32)
    other = attend(query, layer._parts(None), 2, kernel=kernel)
    assert torch.equal(output[[0, 2]], other[[0, 2]])
    assert not torch.equal(output[1], other[1])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_compiled_splits_a_sequence_over_threads(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check((1, 1, 3, 64, 3000, 0, 1, {"nbits": 2}), "compiled")
    finally:
        torch.set_num_threads(before)


class TestChoice:
    @pytest.fixture(autouse=True)
    def forget(self):
        engine._kernel_on.cache_clear()
        yield
        engine._kernel_on.cache_clear()

    def test_by_default_cpus_run_compiled(self, monkeypatch):
        monkeypatch.delenv("KVCACHE_PLUGINS_KERNELS", raising=False)
        assert engine.choose_kernel(torch.randn(1, 1, 1, 8)) == ("compiled", False)

    def test_a_prompt_is_not_decoding(self):
        assert engine.choose_kernel(torch.randn(1, 1, 17, 8)) == ("torch", False)

    @pytest.mark.parametrize("kernel", ["torch", "compiled"])
    def test_variable_overrides(self, monkeypatch, kernel):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        assert engine.choose_kernel(torch.randn(1, 1, 1, 8)) == (kernel, False)

    def test_unknown_kernel_is_refused(self, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "cuda")
        with pytest.raises(ValueError, match="KVCACHE_PLUGINS_KERNELS.*auto, triton, torch, compiled.*'cuda'"):
            engine.choose_kernel(torch.randn(1, 1, 1, 8))

    def test_amd_gpus_take_plain_pytorch_and_say_why(self, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "6.4")
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "auto")
        with pytest.warns(UserWarning, match="plain PyTorch instead of `triton`.*this is an AMD GPU"):
            assert engine._kernel_on("cuda", "auto") == ("torch", True)
        kernel, reason = engine.explain_kernel("cuda")
        assert kernel == "torch" and reason is not None and "AMD" in reason

    def test_nvidia_gpus_take_the_kernels(self, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", None)
        assert engine._kernel_on("cuda", "auto") == ("triton", False)

    @pytest.mark.parametrize("kernel", ["auto", "compiled", "torch"])
    def test_cpus_copy_in_plain_pytorch(self, kernel, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert engine.choose_copy_kernel(torch.randn(1, 1, 1, 8)) == "torch"

    def test_kernels_that_are_asked_for_and_missing_warn_once(self, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        monkeypatch.setattr(engine, "find_spec", lambda name: None)
        with pytest.warns(UserWarning, match="coding run in plain PyTorch.*Triton is not installed"):
            assert engine.choose_copy_kernel(torch.randn(1, 1, 1, 8)) == "torch"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # The same warning, for attention
            assert engine.choose_kernel(torch.randn(1, 1, 1, 8)) == ("torch", True)

    def test_copies_by_kernels_have_no_gradients(self, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        states = torch.randn(1, 1, 1, 8, requires_grad=True)
        assert engine.choose_copy_kernel(states) == "torch"
        with torch.no_grad():
            assert engine.choose_copy_kernel(states) == "triton"

    def test_without_kernels_it_warns_once_and_counts(self, monkeypatch):
        monkeypatch.setattr(library, "why_missing", lambda: "the C kernels are not compiled")
        cache = GEARCache(nbits=2)
        states = torch.randn(1, 2, 100, 32)
        cache.update(states, states, 0)
        cache.layers[0].settle_prompt()
        with pytest.warns(UserWarning, match="plain PyTorch.*C kernels are not compiled"):
            cache.layers[0].attend(AttentionCall(torch.randn(1, 4, 1, 32)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.layers[0].attend(AttentionCall(torch.randn(1, 4, 1, 32)))
        stats = cache.stats()
        assert (stats["attend_calls"], stats["fused_calls"], stats["kernel_fallbacks"]) == (2, 0, 2)


@pytest.mark.long
def test_model_says_the_same_through_every_kernel(tiny_llama, monkeypatch):
    input_ids = torch.randint(3, 128, (2, 150))
    mask = torch.ones_like(input_ids)
    mask[1, :40] = 0
    outputs = []
    for kernel in KERNELS:
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        cache = GEARCache(nbits=2)
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        outputs.append(tiny_llama.generate(input_ids, past_key_values=cache, **options))
        assert cache.stats()["fused_calls"] == (0 if kernel == "torch" else cache.stats()["attend_calls"])
        assert cache.stats()["dense_reads"] == 0
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
