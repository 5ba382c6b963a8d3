"""States that are out of the ordinary, in layers of every GEAR preset: near to dense at 8 bits, or a clear refusal."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins import create_cache
from kvcache_plugins.layers.compressed_layer import CompressedLayer


PRESETS = ("gear-2bit", "gear-l-2bit", "gear-k4v3", "kivi-2bit", "per-token-2bit", "kcvt-4bit", "transform-22")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_HEADS, HEAD_DIM, PROMPT, RESIDUAL = 2, 64, 64, 16
# Attention's output: relative to that over dense states, and the finest step of float16, in which scales are stored
RELATIVE, ABSOLUTE = 0.05, 2e-6
# Points of normal variables end at 4.4 deviations, where a channel stands out of its token, and none is zero, where
# all channels but one are
NOT_NORMAL = {("transform-22", change): 0.25 for change in ("7e4", "peaks of both signs", "constant")}


def with_peak(states: torch.Tensor, peak: float) -> torch.Tensor:
    states[:, :, PROMPT // 2, 0] = peak
    return states


def with_peaks(states: torch.Tensor) -> torch.Tensor:
    states[:, :, PROMPT // 2, 0], states[:, :, PROMPT // 3, 0] = 6e4, -6e4
    return states


def with_offsets(states: torch.Tensor) -> torch.Tensor:
    states[..., 0] = 1e4
    states[..., 1] += 1e4
    return states


NOT_FINITE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda states: with_peak(states, torch.nan),
    "infinity": lambda states: with_peak(states, torch.inf),
}
EXTREME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "7e4": lambda states: with_peak(states, 7e4),
    "peaks of both signs": with_peaks,
    "offsets": with_offsets,
    "constant": lambda states: torch.full_like(states, 0.37),
    "zero": torch.zeros_like,
    "tiny": lambda states: states * 1e-9,
    "denormal": lambda states: states * 1e-41,
    "denormal in float16": lambda states: states * 1e-7,
}


Layer = CompressedLayer
# So that all of them are at 8 bits, and compress a prompt of 64 tokens
SIDES = {"key_nbits": 8, "value_nbits": 8}
OPTIONS = {"gear-k4v3": SIDES, "transform-22": {**SIDES, "num_sink_tokens": 0}}


def make_layer(preset: str) -> Layer:
    options = {"residual_length": RESIDUAL, **OPTIONS.get(preset, {"nbits": 8})}
    layer = create_cache(preset, None, **options)._next_layer()
    assert isinstance(layer, Layer)
    return layer


def states_of(change: Callable[[torch.Tensor], torch.Tensor], length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values, both changed, the first `length` tokens of them."""
    return [change(torch.randn(2, NUM_HEADS, PROMPT, HEAD_DIM)).to(dtype)[:, :, :length] for _ in range(2)]


@torch.no_grad()
def attend(layer: Layer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    lazy = layer.update(keys, values)
    return F.scaled_dot_product_attention(query, *lazy, is_causal=query.shape[2] > 1, enable_gqa=True)


def queries(length: int, dtype: torch.dtype, size: float = 1.0) -> torch.Tensor:
    return (size * torch.randn(2, 2 * NUM_HEADS, length, HEAD_DIM)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("change", EXTREME)
def test_extreme_states_are_near_dense_or_refused(change: str, preset: str, dtype: torch.dtype) -> None:
    """A prompt and decoded tokens until a chunk of them is compressed."""
    layer, size = make_layer(preset), 1e-4
    chunks = [states_of(EXTREME[change], PROMPT, dtype)]
    chunks += [[side[:, :, :1] for side in states_of(EXTREME[change], 1, dtype)] for _ in range(RESIDUAL + 1)]
    try:
        for number, (keys, values) in enumerate(chunks):
            length = PROMPT if number == 0 else 1
            output = attend(layer, query := queries(length, dtype, size), keys, values)
    except ValueError as error:
        assert change == "7e4" or change.startswith("peaks")
        assert "float16 (65504)" in str(error) or "NaN or infinity" in str(error)
        require_usable(layer, dtype)
        return
    assert layer.stats()["chunks_compressed"] == 2
    keys, values = (torch.cat(sides, dim=2).float() for sides in zip(*chunks, strict=True))
    expected = F.scaled_dot_product_attention(query.float(), keys, values, enable_gqa=True)
    error = (output.float() - expected).abs().amax().item()
    assert error <= NOT_NORMAL.get((preset, change), RELATIVE) * expected.abs().amax().item() + ABSOLUTE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("change", NOT_FINITE)
def test_prompts_that_are_not_finite_are_refused(change: str, preset: str, dtype: torch.dtype) -> None:
    layer = make_layer(preset)
    with pytest.raises(ValueError, match="layer 0: the keys to be compressed hold NaN or infinity"):
        attend(layer, queries(PROMPT, dtype), *states_of(NOT_FINITE[change], PROMPT, dtype))
    assert layer.get_seq_length() == 0
    require_usable(layer, dtype)


@pytest.mark.parametrize("preset", PRESETS)
def test_decoded_nan_is_refused_until_it_is_cropped(preset: str) -> None:
    """Keeps a decoded NaN exact, as a dense cache does, and names it when its chunk is to be compressed."""
    layer, dtype = make_layer(preset), torch.float32
    attend(layer, queries(PROMPT, dtype), *states_of(torch.clone, PROMPT, dtype))
    fine, kept = states_of(torch.clone, 1, dtype), layer.policy.num_kept
    for _ in range(RESIDUAL - 1 - kept):
        attend(layer, queries(1, dtype), *fine)
    assert attend(layer, queries(1, dtype), fine[0], torch.full_like(fine[1], torch.nan)).isnan().all()
    for _ in range(kept):
        attend(layer, queries(1, dtype), *fine)
    exact = layer.storage.tail.values.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="the values to be compressed hold NaN or infinity.* `crop`"):
            attend(layer, queries(1, dtype), *fine)
        assert layer.get_seq_length() == PROMPT + RESIDUAL and layer.stats()["chunks_compressed"] == 1
        torch.testing.assert_close(layer.storage.tail.values, exact, rtol=0, atol=0, equal_nan=True)
    layer.crop(-1 - kept)
    for _ in range(2 + kept):
        assert attend(layer, queries(1, dtype), *fine).isfinite().all()
    assert layer.stats()["chunks_compressed"] == 2


def require_usable(layer: Layer, dtype: torch.dtype) -> None:
    """Requires that `reset` forgets a refused prompt."""
    layer.reset()
    keys, values = states_of(torch.clone, PROMPT, dtype)
    attend(layer, queries(PROMPT, dtype), keys, values)
    assert layer.to_dense("keys").sub(keys).abs().amax() < 0.1
