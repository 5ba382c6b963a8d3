"""OSCAR and SAW-INT4: codes as written out, exact tails, and rotations that a calibration fits."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from kvcache_plugins import create_cache
from kvcache_plugins.baselines.affine_coder import AffineCoder
from kvcache_plugins.baselines.oscar import OscarCache
from kvcache_plugins.baselines.oscar_rotations import (
    _covariances,
    calibrate_rotations,
    load_rotations,
    save_rotations,
)
from kvcache_plugins.contract.comparison import reachable_bytes
from kvcache_plugins.eval.tiny_models import build_family
from kvcache_plugins.formats.hadamard import rotate
from kvcache_plugins.layers.query_recorder import record_queries


@pytest.mark.parametrize(("nbits", "clip"), [(2, 0.96), (2, 0.92), (4, 1.0)])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_codes_equal_a_plain_loop(head_dim, nbits, clip):
    states = torch.randn(2, 3, 5, head_dim) * torch.rand(head_dim).exp()
    rotation = rotate(torch.eye(head_dim))
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(head_dim))
    coder = AffineCoder(head_dim, nbits, is_rotated=True, clip=clip)
    rows = coder.encode(states)
    assert rows.shape == (2, 3, 5, coder.row_size) and rows.dtype == torch.uint8
    size = 128 if head_dim % 128 == 0 else head_dim
    expected = torch.empty_like(states)
    for token in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(5)).tolist():
        groups = (states[tuple(token)] @ rotation).split(size)
        decoded = []
        for group in groups:
            limit = group.abs().sort().values[round(clip * size) - 1]
            clipped = group.clamp(-limit, limit)
            low = clipped.min().half().float()
            step = ((clipped.max() - low) / (2**nbits - 1)).half().float()
            decoded.append(((clipped - low) / step).round().clamp(0, 2**nbits - 1) * step + low)
        expected[tuple(token)] = torch.cat(decoded) @ rotation.mT
    torch.testing.assert_close(coder.decode(rows), expected, atol=1e-4, rtol=1e-4)


def test_constant_states_are_exact_to_float16():
    coder = AffineCoder(64, 2)
    states = torch.full((1, 1, 2, 64), 3.5)
    assert torch.equal(coder.decode(coder.encode(states)), states)


@torch.no_grad()
def test_saw_int4_rotates_keys_and_has_published_bytes(tiny_llama):
    cache = create_cache("saw-int4", tiny_llama)
    tiny_llama(torch.randint(3, 128, (1, 100)), past_key_values=cache)
    memory = cache.memory()
    # 4 bits a channel and a float16 scale and minimum for the 32 channels of a head
    assert memory.parts["codes"] == 2 * 2 * 2 * 100 * (32 // 2 + 4)
    assert memory.total_bytes == reachable_bytes(cache)
    codec = cache.layers[0].codec
    assert codec.keys.is_rotated and not codec.values.is_rotated


@torch.no_grad()
def test_oscar_keeps_first_and_newest_tokens_exact():
    with pytest.warns(UserWarning, match="without a calibration"):
        cache = OscarCache()
    keys = torch.randn(1, 2, 500, 32)
    cache.update(keys[:, :, :450], keys[:, :, :450], 0)
    cache.layers[0].commit_prompt()
    for position in range(450, 500):
        cache.update(keys[:, :, position : position + 1], keys[:, :, position : position + 1], 0)
    found = cache.layers[0].to_dense("keys")
    assert torch.equal(found[:, :, :64], keys[:, :, :64]) and torch.equal(found[:, :, -256:], keys[:, :, -256:])
    is_exact = (found == keys).all(dim=3)
    assert not is_exact[:, :, 64:-257].any()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 320])
@torch.no_grad()
def test_short_prompts_stay_exact_with_oscar(length, tiny_llama):
    with pytest.warns(UserWarning, match="without a calibration"):
        cache = create_cache("oscar-2bit", tiny_llama)
    tokens = torch.randint(3, 128, (2, length + 3))
    mask = torch.ones_like(tokens)
    mask[1, : length // 2] = 0
    dense = DynamicCache(config=tiny_llama.config)
    for chunk, stop in ((tokens[:, :length], length), *((tokens[:, [i]], i + 1) for i in range(length, length + 3))):
        found, expected = (
            tiny_llama(chunk, attention_mask=mask[:, :stop], past_key_values=each).logits for each in (cache, dense)
        )
    for layer, reference in zip(cache.layers, dense.layers, strict=True):
        exact = layer.to_dense("keys")[0, :, : min(length, 64)]
        torch.testing.assert_close(exact, reference.keys[0, :, : min(length, 64)], atol=1e-5, rtol=1e-5)
    if length < 320:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert cache.memory().total_bytes == reachable_bytes(cache)


def test_calibrated_rotations_lower_the_error_that_attention_sees(tiny_model, random_windows, tmp_path):
    model = tiny_model("llama", seed=0, initializer_range=0.2)
    rotations = calibrate_rotations(model, random_windows(2, 200))
    for sides in rotations.values():
        for matrices in sides:
            torch.testing.assert_close(matrices @ matrices.mT, torch.eye(32).expand(2, -1, -1), atol=1e-4, rtol=1e-4)
    path = tmp_path / "rotations.safetensors"
    save_rotations(rotations, path)
    loaded = load_rotations(path)
    assert all(torch.equal(*each) for index in rotations for each in zip(rotations[index], loaded[index], strict=True))
    cache = create_cache("oscar-2bit", model, calibration=str(path))
    with torch.no_grad():
        model(torch.randint(3, 128, (1, 400)), past_key_values=cache)
    assert torch.equal(cache.layers[1].codec.keys.rotation, rotations[1][0])
    shared = sum(cache.memory().shared.values())
    assert shared == sum(each.nbytes for sides in rotations.values() for each in sides)


def test_a_calibration_of_another_model_is_refused(tiny_model, tmp_path):
    path = tmp_path / "rotations.safetensors"
    save_rotations({index: (torch.eye(16)[None], torch.eye(16)[None]) for index in range(2)}, path)
    cache = create_cache("oscar-2bit", tiny_model("llama"), calibration=str(path))
    with pytest.raises(
        ValueError, match="`calibration` is for keys of 1 heads of 16 channels, but these have 2 of 32"
    ):
        cache.update(torch.randn(1, 2, 4, 32), torch.randn(1, 2, 4, 32), 0)
    with pytest.raises(ValueError, match=r"of the layers \[0, 1\], but the cache codes layer 2 too"):
        create_cache("oscar-2bit", tiny_model("llama", num_hidden_layers=3), calibration=str(path))
    for other in ("no-such-file", 5):
        with pytest.raises(ValueError, match="`calibration`.*no such file"):
            create_cache("oscar-2bit", calibration=other)
    for stored in ({"weight": torch.ones(2)}, {"0.keys": torch.eye(16)[None]}):
        save_file(stored, path)
        with pytest.raises(ValueError, match="`calibration`.*no file of `kvcache-plugins calibrate --cache oscar`"):
            create_cache("oscar-2bit", calibration=str(path))
    path.write_text("text")
    with pytest.raises(ValueError, match="`calibration`.*no file of"):
        create_cache("oscar-2bit", calibration=str(path))


@torch.no_grad()
def test_calibration_weights_values_by_the_models_own_attention():
    # Its scores are not scaled by the head dimension
    model = build_family("granite")
    tokens = torch.randint(3, 60, (1, 100))
    recorded, dense = DynamicCache(config=model.config), DynamicCache(config=model.config)
    record_queries(recorded)
    model(tokens, past_key_values=recorded)
    model.set_attn_implementation("eager")
    attentions = model(tokens, past_key_values=dense, output_attentions=True).attentions
    for found, reference, weights in zip(recorded.layers, dense.layers, attentions, strict=True):
        received = weights[0].unflatten(0, (reference.values.shape[1], -1)).sum(dim=(1, 2))[..., None]
        own = reference.values[0].double()
        covariance = _covariances(found.queries, found.keys, found.values, found.scale)[1]
        torch.testing.assert_close(covariance, own.mT @ (own * received), rtol=1e-5, atol=1e-5)


def test_a_model_that_shows_no_queries_has_no_calibration(random_windows):
    with pytest.raises(ValueError, match="a `DeepseekV3ForCausalLM` shows a cache no queries"):
        calibrate_rotations(build_family("deepseek_v3"), random_windows(1, 50))
