"""Choice of kernels: by device, by environment variable, and with a warning if one is missing."""

import warnings

import pytest
import torch

from kvcache_plugins import GEARCache
from kvcache_plugins.kernels import engine, library
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.selective_attention import choose_rows_kernel


ONE_TOKEN = torch.randn(1, 1, 1, 8)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.delenv("KVCACHE_PLUGINS_KERNELS", raising=False)
    engine._kernel_on.cache_clear()
    yield
    engine._kernel_on.cache_clear()


@pytest.mark.parametrize(
    ("asked", "num_queries", "expected"),
    [(None, 1, "compiled"), (None, 17, "torch"), ("torch", 1, "torch"), ("compiled", 1, "compiled")],
)
def test_cpu_kernel_follows_the_setting(monkeypatch, asked, num_queries, expected):
    if asked is not None:
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", asked)
    assert engine.choose_kernel(torch.randn(1, 1, num_queries, 8)) == (expected, False)


def test_unknown_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "cuda")
    with pytest.raises(ValueError, match="KVCACHE_PLUGINS_KERNELS.*auto, triton, torch, compiled.*'cuda'"):
        engine.choose_kernel(ONE_TOKEN)


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_nvidia_gpus_use_triton_and_amd_gpus_give_the_reason(monkeypatch, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    if hip is None:
        assert engine._kernel_on("cuda", "auto") == ("triton", False)
        return
    with pytest.warns(UserWarning, match="plain PyTorch instead of `triton`.*this is an AMD GPU"):
        assert engine._kernel_on("cuda", "auto") == ("torch", True)
    kernel, reason = engine.explain_kernel("cuda")
    assert kernel == "torch" and reason is not None and "AMD" in reason


def test_an_older_triton_is_not_used(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.4.0")
    with pytest.warns(UserWarning, match="need Triton 3.5 or newer, and 3.4.0 is installed"):
        assert engine._kernel_on("cuda", "auto") == ("torch", True)


@pytest.mark.parametrize("kernel", ["auto", "compiled", "torch"])
def test_cpu_copies_use_plain_pytorch(kernel, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.choose_copy_kernel(ONE_TOKEN) == "torch"


def test_kernels_that_are_asked_for_and_missing_warn_once(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="coding run in plain PyTorch.*Triton is not installed"):
        assert engine.choose_copy_kernel(ONE_TOKEN) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The same warning, for attention
        assert engine.choose_kernel(ONE_TOKEN) == ("torch", True)


def test_copies_by_kernels_have_no_gradients(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    states = torch.randn(1, 1, 1, 8, requires_grad=True)
    assert engine.choose_copy_kernel(states) == "torch"
    with torch.no_grad():
        assert engine.choose_copy_kernel(states) == "triton"


@pytest.mark.parametrize(
    ("dims", "dtype", "expected"),
    [
        ((64, 64), torch.bfloat16, ("compiled", False)),
        ((64, 64), torch.float64, ("torch", True)),
        ((64, 700), torch.float32, ("torch", True)),
    ],
    ids=str,
)
def test_rows_that_c_cannot_read_are_left_to_pytorch(dims, dtype, expected):
    assert choose_rows_kernel(torch.randn(1, 1, 71, dims[0]), dims[1], dtype) == expected


def test_without_the_library_it_warns_once_and_counts(monkeypatch):
    monkeypatch.setattr(library, "why_missing", lambda: "the C kernels are not compiled")
    cache, states = GEARCache(nbits=2), torch.randn(1, 2, 100, 32)
    cache.update(states, states, 0)
    cache.layers[0].commit_prompt()
    with pytest.warns(UserWarning, match="plain PyTorch.*C kernels are not compiled"):
        cache.layers[0].attend(AttentionCall(torch.randn(1, 4, 1, 32)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.layers[0].attend(AttentionCall(torch.randn(1, 4, 1, 32)))
        assert choose_rows_kernel(ONE_TOKEN, 8, torch.float32) == ("torch", True)
    stats = cache.stats()
    assert (stats["attend_calls"], stats["fused_calls"], stats["kernel_fallbacks"]) == (2, 0, 2)
