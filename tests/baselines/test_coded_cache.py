"""Caches that code tokens independently: equal to attention over decoded tokens, and refusals without harm."""

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins import create_cache
from kvcache_plugins.baselines import LlamaCppCache, TurboQuantCache
from kvcache_plugins.baselines.coded_cache import CodedTokensCache
from kvcache_plugins.kernels import ops
from kvcache_plugins.registry import list_caches


NAMES = [*list_caches("turboquant-*"), *list_caches("llamacpp-*")]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_equals_attention_over_decoded_rows(head_dim, dtype, monkeypatch):
    monkeypatch.setattr(ops, "TILE_TOKENS", 16)
    for cache in (*map(create_cache, NAMES), TurboQuantCache(nbits=3, residual=True)):
        for count in (37, 1, 5):
            keys, values = (torch.randn(2, 2, count, head_dim).to(dtype) for _ in range(2))
            query = torch.randn(2, 6, count, head_dim).to(dtype)
            lazy = cache.update(keys, values, 0)
            mask = torch.ones(count, cache.get_seq_length(), dtype=torch.bool).tril(cache.get_seq_length() - count)
            output = F.scaled_dot_product_attention(query, *lazy, attn_mask=mask, enable_gqa=True)
        layer = cache.layers[0]
        dense = [layer.to_dense(side).float() for side in ("keys", "values")]
        expected = F.scaled_dot_product_attention(query.float(), *dense, attn_mask=mask, enable_gqa=True)
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=0)
        stats = cache.stats()
        assert (stats["attend_calls"], stats["tokens_compressed"], stats["tokens_exact"]) == (2, 43, 0)


def coded(cache: CodedTokensCache, states: torch.Tensor, side: str) -> torch.Tensor:
    """Codes states in a cache and decodes one side."""
    cache.update(states, states, 0)
    cache.layers[0].commit_prompt()
    return cache.layers[0].to_dense(side)


def test_more_bits_have_less_error() -> None:
    states = torch.randn(1, 2, 200, 64)
    states[..., 7] *= 8
    errors = {}
    for name in NAMES:
        errors[name] = (coded(create_cache(name), states, "keys") - states).square().mean().item()
    by_bits = [f"llamacpp-{each}" for each in ("q8_0", "q5_1", "q4_1")]
    for better, worse in (
        *zip(by_bits, by_bits[1:], strict=False),
        ("llamacpp-q5_0", "llamacpp-q4_0"),
        ("turboquant-4bit", "turboquant-3bit"),
        ("turboquant-3bit", "turboquant-2bit"),
    ):
        assert 2 * errors[better] < errors[worse]


def test_rotation_spreads_an_outlier_channel() -> None:
    states = torch.randn(1, 2, 200, 64)
    states[..., 7] *= 30
    errors = []
    for rotate in (True, False):
        cache = LlamaCppCache(type="q4_0", rotate=rotate)
        errors.append((coded(cache, states, "values") - states).square().mean().item())
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("name", ["turboquant-2bit", "llamacpp-q4_1"])
@pytest.mark.parametrize("peak", [torch.nan, torch.inf, 1e30])
def test_unstorable_states_are_refused(name: str, peak: float) -> None:
    cache, states = create_cache(name), torch.randn(1, 2, 20, 64)
    cache.update(states, states, 0)
    cache.layers[0].commit_prompt()
    bad = states[:, :, :1].clone()
    bad[..., 3] = peak
    message = "float16" if peak == 1e30 else "layer 0: the keys to be compressed hold NaN or infinity"
    with pytest.raises(ValueError, match=message):
        cache.update(bad, bad, 0)
    assert cache.get_seq_length() == 20
    cache.update(states, states, 0)
    assert cache.layers[0].to_dense("keys").isfinite().all()
    # A first prompt too
    first = create_cache(name)
    first.update(bad, bad, 0)
    with pytest.raises(ValueError, match=message):
        first.layers[0].commit_prompt()
    assert first.get_seq_length() == 0


@pytest.mark.parametrize("name", NAMES)
def test_small_and_constant_states_have_small_errors(name: str) -> None:
    for states in (torch.zeros(1, 1, 3, 64), torch.full((1, 1, 3, 64), 0.37), torch.randn(1, 1, 3, 64) * 1e-41):
        error = coded(create_cache(name), states, "keys") - states
        # Rotations turn a constant into one large channel, larger than TurboQuant's outermost level
        assert error.abs().amax() <= 0.3
