"""Compression by kernels against the same in plain PyTorch. Without a GPU they run in Triton's interpreter."""

import re
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_plugins import GEARCache
from kvcache_plugins.gear.compression import compress_tokens
from kvcache_plugins.gear.config import SideConfig
from kvcache_plugins.gear.decomposition import decompose
from kvcache_plugins.ops import dispatch, triton_compression
from kvcache_plugins.ops.compression_steps import CompressionSteps
from kvcache_plugins.ops.low_rank import starting_matrix
from kvcache_plugins.ops.quantization import Grouping, unpack


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    dispatch._why_not("triton", DEVICE) is not None, reason="needs a GPU, or TRITON_INTERPRET=1"
)
# Side, grouping, chunk length, head dim, bits, sparsity, rank, dtype, padding tokens of the second item
CASES = {
    "kcvt keys, odd head dim": ("key", Grouping("channel", None), 64, 20, 2, 0.05, 2, torch.bfloat16, None),
    "kivi keys, padding": ("key", Grouping("channel", 24), 48, 20, 3, 0.1, 2, torch.float32, 70),
    "per-token keys, padding": ("key", Grouping("token", 8), 40, 16, 4, 0.1, 2, torch.float32, 15),
    "keys, one chunk of padding": ("key", Grouping("channel", None), 30, 16, 2, 0.1, 1, torch.float32, 30),
    "two tiles of keys": ("key", Grouping("channel", 35), 70, 8, 4, 0.05, 2, torch.float32, 30),
    "kcvt values": ("value", Grouping("token", None), 32, 20, 2, 0.05, 2, torch.float16, None),
    "kcvt values, padding": ("value", Grouping("token", None), 48, 16, 3, 0.1, 2, torch.float32, 60),
    "two tiles of per-token values": ("value", Grouping("token", 8), 70, 16, 8, 0.1, 2, torch.float32, None),
    "no outliers": ("value", Grouping("token", 8), 24, 16, 2, 0.0, 2, torch.float32, 20),
    "no low rank": ("key", Grouping("channel", None), 32, 16, 2, 0.1, 0, torch.bfloat16, 20),
    "backbone alone": ("key", Grouping("channel", None), 32, 16, 4, 0.0, 0, torch.float32, 20),
    "wide outlier indices": ("value", Grouping("token", None), 2, 520, 2, 0.01, 1, torch.float32, None),
}


def make_states(*shape: int) -> torch.Tensor:
    """Channels of different offset and size, with a few large values, as a view like those of a buffer."""
    states = torch.randn(shape) * torch.rand(shape[-1]) * 2 + torch.randn(shape[-1])
    states = torch.where(torch.rand(shape) < 0.01, states * 6, states)
    return torch.cat([states, states], dim=3).to(DEVICE)[:, :, :, : shape[3]]


def side_config(side, nbits, sparsity, rank):
    return SideConfig(side=side, nbits=nbits, backbone="kivi", sparsity=sparsity, rank=rank, decode_rank=rank)


def decompose_by(kernel, monkeypatch, states, valid, config, grouping, recent_ratio=1.0):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
    return decompose(states, valid, config, grouping, config.rank, 3, recent_ratio)


def dense(compressed, states):
    tile = compressed.dequantize_tile(slice(0, states.shape[2]), slice(0, states.shape[3]))
    return tile.unflatten(2, states.shape[2:4])


def check_same(kernel, plain, states, valid) -> None:
    """Layout and, where tokens are real, codes up to ties of rounding and all of the error."""
    described = [
        [(name, tensor.shape, tensor.dtype, tensor.is_contiguous()) for name, tensor in compressed.named_tensors()]
        for compressed in (kernel, plain)
    ]
    assert described[0] == described[1]
    real = torch.ones_like(states, dtype=torch.bool)
    if valid is not None:
        real &= valid[:, None, :, :, None]
    codes, expected = (unpack(compressed.codes, plain.nbits, plain.head_dim).int() for compressed in (kernel, plain))
    difference = (codes - expected).abs()[real]
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3
    error, expected_error = (
        (dense(compressed, states) - states)[real].norm().item() for compressed in (kernel, plain)
    )
    assert error == pytest.approx(expected_error, rel=0.01)
    assert dense(kernel, states).isfinite().all()
    if plain.outlier_offsets is not None and states.dtype == torch.float32:
        assert torch.equal(kernel.outlier_offsets, plain.outlier_offsets)
        assert torch.equal(kernel.outlier_indices, plain.outlier_indices)
        torch.testing.assert_close(kernel.outlier_values, plain.outlier_values, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_compress_as_plain_pytorch_does(case, monkeypatch):
    side, grouping, length, head_dim, nbits, sparsity, rank, dtype, padding = case
    states = make_states(2, 2, 2, length, head_dim).to(dtype)
    valid = None
    if padding is not None:
        valid = torch.arange(2 * length, device=DEVICE) >= torch.tensor([0, padding], device=DEVICE)[:, None]
        valid = valid.unflatten(1, (2, length))
        # Padding enters nothing, whatever it holds
        states = torch.where(valid[:, None, :, :, None], states, torch.inf)
    config = side_config(side, nbits, sparsity, rank)
    kernel, plain = (decompose_by(name, monkeypatch, states, valid, config, grouping) for name in ("triton", "torch"))
    check_same(kernel, plain, states.nan_to_num(posinf=0.0), valid)


# What kernels do not cover: a limit that is lowered, steps that have to be plain, side, rank and recent ratio
NOT_COVERED = {
    "long rows of keys": ({"MAX_ROW_LENGTH": 23}, {"select_outliers"}, "key", 1, 1.0),
    "long rows of values": ({"MAX_ROW_LENGTH": 31}, {"select_outliers"}, "value", 1, 1.0),
    "many outliers a row": ({"_MAX_PER_SIDE": 0}, {"select_outliers"}, "key", 1, 1.0),
    "large matrices": ({"MAX_SIDE": 23}, {"approximate"}, "value", 1, 1.0),
    "large rank": ({}, {"approximate"}, "key", 17, 1.0),
    "recent tokens": ({}, {"approximate"}, "key", 2, 0.4),
    "many outliers": ({"MAX_OUTLIERS": 10}, {"store_outliers"}, "value", 1, 1.0),
}


@pytest.mark.parametrize("is_padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("case", NOT_COVERED.values(), ids=NOT_COVERED)
def test_what_kernels_do_not_cover_is_plain(case, is_padded, monkeypatch):
    limits, expected_steps, side, rank, recent_ratio = case
    for name, value in limits.items():
        monkeypatch.setattr(triton_compression, name, value)
    states, valid = make_states(1, 2, 1, 24, 18), None
    if is_padded:
        valid = (torch.arange(24, device=DEVICE) >= 5)[None, None]
    config, grouping = side_config(side, 2, 0.1, rank), Grouping("channel" if side == "key" else "token", None)
    plain = decompose_by("torch", monkeypatch, states, valid, config, grouping, recent_ratio)
    plain_steps = set()
    for name in ("select_outliers", "quantize", "approximate", "store_outliers"):
        step = getattr(CompressionSteps, name)

        def noted(self, *args, _name=name, _step=step, **kwargs):
            plain_steps.add(_name)
            return _step(self, *args, **kwargs)

        monkeypatch.setattr(CompressionSteps, name, noted)
    kernel = decompose_by("triton", monkeypatch, states, valid, config, grouping, recent_ratio)
    assert plain_steps == expected_steps
    check_same(kernel, plain, states, valid)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sparsity", [0.0, 0.1])
@pytest.mark.parametrize("side", ["key", "value"])
def test_what_exceeds_float16_is_refused(side, sparsity, monkeypatch):
    states = make_states(1, 1, 2, 24, 16)
    states[0, 0, 1, 3, 5] = 1e6
    with pytest.raises(ValueError, match="range of float16"):
        decompose_by("triton", monkeypatch, states, None, side_config(side, 2, sparsity, 0), Grouping("token", 16))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_low_rank_that_exceeds_float16_is_refused(monkeypatch):
    states = make_states(1, 1, 1, 64, 16)
    # Codes stand for -6e4, -2e4, 2e4 and 6e4
    states[..., 3] = 3e3
    states[..., :2, 3] = torch.tensor([-6e4, 6e4])
    with pytest.raises(ValueError, match="range of float16"):
        decompose_by("triton", monkeypatch, states, None, side_config("key", 2, 0, 2), Grouping("channel", None))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("bad", "message"),
    [(float("nan"), "layer 0: the values.*NaN or infinity"), (1e6, "layer 0: the states exceed the range of float16")],
)
def test_a_chunk_that_is_refused_stays_exact(bad, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    cache = GEARCache(nbits=2, residual_length=16, rank=1, sparsity=0.1)
    # The first token is a prompt of its own, which is too short to be compressed
    for _ in range(17):
        states = make_states(1, 1, 1, 1, 16)[:, :, 0]
        cache.update(states, states, 0)
    layer = cache.layers[0]
    layer.buffer.values[0, 0, 3, 5] = bad
    exact = layer.buffer.values.clone()
    with pytest.raises(ValueError, match=message):
        cache.update(states, states, 0)
    torch.testing.assert_close(layer.buffer.values, exact, rtol=0, atol=0, equal_nan=True)
    assert layer.get_seq_length() == 17
    assert cache.stats()["chunks_compressed"] == cache.stats()["fused_compressions"] == 0


class OperationCounter(TorchDispatchMode):
    """Names of the operations that are more than a view or an allocation."""

    FREE = (
        "empty",
        "view",
        "expand",
        "squeeze",
        "transpose",
        "permute",
        "slice",
        "select",
        "stride",
        "alias",
        "detach",
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not any(free in name for free in self.FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_a_chunk_takes_four_launches_a_side_and_one_look_of_the_host(monkeypatch):
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    launches = []
    for launcher in (GridExecutor, JITFunction):
        name = "__call__" if launcher is GridExecutor else "run"
        monkeypatch.setattr(launcher, name, lambda self, *args, **kwargs: launches.append(self.fn.__name__))
    keys, values = make_states(1, 2, 1, 64, 32)[:, :, 0], make_states(1, 2, 1, 64, 32)[:, :, 0]
    config = GEARCache(nbits=2).gear_config
    starting_matrix(32, config.key.decode_rank, keys.device)
    with OperationCounter() as operations:
        block = compress_tokens(keys, values, None, 0, 1, config, 0, is_prompt=False)
    assert block.is_fused
    step_names = ["select_outliers", "quantize_(channels|tokens)", "power_iteration", "store_outliers"]
    assert len(launches) == 2 * len(step_names)
    for name, step in zip(launches, 2 * step_names, strict=True):
        assert re.fullmatch(f"_{step}_kernel", name)
    assert operations.names == ["zeros", "_local_scalar_dense"]


@pytest.mark.parametrize("backbone", ["kcvt", "kivi"])
def test_a_cache_attends_as_with_plain_compression(backbone, monkeypatch):
    """A padded prompt, then several chunks of decoded tokens, two of which end in one update."""
    padding, outputs = [0, 9], []
    prompt = [make_states(2, 1, 1, 45, 16)[:, :, 0] for _ in range(2)]
    decoded = [[make_states(2, 1, 1, length, 16)[:, :, 0] for _ in range(2)] for length in (10, 6, 20, 12, 1)]
    query = torch.randn(2, 2, 1, 16).to(DEVICE)
    for kernel in ("torch", "triton"):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        cache = GEARCache(nbits=3, backbone=backbone, q_group_size=8, residual_length=16, rank=2, sparsity=0.1)
        cache.update(*prompt, 0)
        layer = cache.layers[0]
        layer.padding, layer._mask_seen = torch.tensor(padding, device=DEVICE), True
        for states in decoded:
            cache.update(*states, 0)
        stats = cache.stats()
        assert stats["chunks_compressed"] == 4
        assert stats["fused_compressions"] == (4 if kernel == "triton" else 0)
        mask = torch.arange(stats["tokens_cached"], device=DEVICE) >= layer.padding[:, None]
        # By the same attention, so that what is compared is what was compressed
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
        outputs.append(layer.attend(query, mask[:, None, None], is_causal=False, scale=None))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-2, atol=1e-3)


class TestChoice:
    @pytest.mark.parametrize("kernel", ["auto", "compiled", "torch"])
    def test_cpus_compress_in_plain_pytorch(self, kernel, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dispatch.choose_compression_kernel(torch.randn(1, 1, 1, 8)) == "torch"

    def test_kernels_that_are_asked_for_and_missing_warn_once(self, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
        dispatch._kernel_on.cache_clear()
        try:
            with pytest.warns(UserWarning, match="compression run in plain PyTorch.*Triton is not installed"):
                assert dispatch.choose_compression_kernel(torch.randn(1, 1, 1, 8)) == "torch"
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # The same warning, for attention
                assert dispatch.choose_kernel(torch.randn(1, 1, 1, 8)) == ("torch", True)
        finally:
            dispatch._kernel_on.cache_clear()

    def test_kernels_have_no_gradients(self, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        states = torch.randn(1, 1, 1, 8, requires_grad=True)
        assert dispatch.choose_compression_kernel(states) == "torch"
        with torch.no_grad():
            assert dispatch.choose_compression_kernel(states) == "triton"
