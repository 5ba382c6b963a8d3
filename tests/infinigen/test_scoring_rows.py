"""Layers whose tokens are rows of a codec, by the kernel and in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.formats.rotary import RotaryEmbedding
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.selective_attention import Selection
from kvcache_plugins.transform_coding.config import TransformCodingConfig


FREQUENCIES = tuple((10000.0 ** -(torch.arange(0, 32, 2) / 32)).tolist())
# Key and value dims, query heads a head, options, padding of both sequences, tokens dropped and then added
CASES = {
    "as by default": ((32, 32), 3, {}, None, 0),
    "unlike dims, padding": ((32, 20), 5, {}, (0, 70), 0),
    "no sinks, tokens dropped": ((32, 48), 1, {"sink": 0}, (3, 0), 100),
    "a sequence that is nearly all padding": ((32, 32), 2, {}, (5, 660), 0),
    "a pool that evicts": ((32, 32), 3, {"pool_tokens": 500}, (0, 9), 0),
}


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(key_nbits: float = 4, value_nbits: float = 3.25, **options) -> InfiniGenLayer:
    config = InfiniGenConfig(**options)
    coding = TransformCodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, num_sink_tokens=config.sink)
    return InfiniGenLayer(config, 0, policy=coding.policy(RotaryEmbedding(FREQUENCIES)))


def filled(layer: InfiniGenLayer, dims: tuple[int, int], padding=None, cropped: int = 0, dtype=torch.float32):
    """Fill the layer with 700 tokens of two sequences, some of them in its tail."""

    def new(count: int, seed: int) -> list[torch.Tensor]:
        return [states(2, 3, count, dim, seed=seed + dim).to(dtype) for dim in dims]

    layer.load_prompt(*new(700, 0), None if padding is None else torch.tensor(padding))
    if cropped:
        layer.crop_tokens(cropped)
        layer.update(*new(cropped + 70, 1))
        layer._before_update()
    return layer


def random_choice(layer: InfiniGenLayer) -> Selection:
    """Select slots in any order, without padding: all for the first head, none for the last."""
    generator = torch.Generator().manual_seed(3)
    numbers = layer.scoring._index_of(layer.pool, torch.arange(layer.pool.num_slots).expand(2, 3, -1))
    chances = torch.rand(numbers.shape, generator=generator).masked_fill(numbers < 0, -1)
    count = (chances >= 0).sum(dim=2)
    count[1] = (count[1] * torch.rand(3, generator=generator)).long()
    count[0, 0], count[1, 2] = int((chances[0, 0] >= 0).sum()), 0
    return Selection(chances.argsort(dim=2, descending=True), count)


@pytest.mark.parametrize("masking", ["none", "boolean", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_attention_equals_pytorch(name: str, dtype: torch.dtype, masking: str, monkeypatch) -> None:
    dims, groups, options, padding, cropped = CASES[name]
    layer = filled(make_layer(**options), dims, padding, cropped, dtype)
    choice, query = random_choice(layer), states(2, 3, groups, dims[0], seed=5).to(dtype)
    mask = None if masking == "none" else states(2, 1, 1, layer.get_seq_length(), seed=7)
    mask = mask > 0 if masking == "boolean" else mask
    outputs, scores = [], []
    for kernel in ("torch", "compiled"):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        layer._counters["fused_calls"] = 0
        outputs.append(layer.attend_selection(AttentionCall(query, mask, scale=0.3), choice, None).float())
        scores.append(layer.scoring.scores(query.float(), layer.pool))
        assert layer._counters["fused_calls"] == (kernel == "compiled" and layer.pool.is_in_order)
    assert outputs[0].any()
    tolerance = 2e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(*scores, atol=2e-3, rtol=1e-3)
    # Scores are those of the keys that are attended to, first tokens aside
    slots = torch.arange(layer.pool.num_slots).expand(2, 3, -1)
    keys, _ = layer.scoring.dense(layer.pool.gather(slots), slots, layer.pool)
    numbers = layer.scoring._index_of(layer.pool, slots)
    is_other = (numbers >= layer.config.sink)[:, :, None].expand_as(scores[0])
    expected = query.float() @ keys.float().transpose(2, 3)
    torch.testing.assert_close(scores[0][is_other], expected[is_other], atol=5 * tolerance, rtol=5 * tolerance)


@pytest.mark.parametrize("num_threads", [2], indirect=True)
def test_attention_is_bitwise_equal_for_any_threads(num_threads: int, monkeypatch) -> None:
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")
    layer, outputs = filled(make_layer(), (32, 32)), []
    for count in (1, num_threads):
        torch.set_num_threads(count)
        call = AttentionCall(states(2, 3, 5, 32), scale=0.3)
        outputs.append(layer.attend_selection(call, random_choice(layer), None))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("pool_tokens", [None, 60])
@pytest.mark.parametrize("padding", [None, [0, 9]], ids=str)
def test_first_tokens_are_exact_and_do_not_enter_the_fit(padding: list[int] | None, pool_tokens: int | None) -> None:
    layer, first = make_layer(sink=3, pool_tokens=pool_tokens), padding or [0, 0]
    keys, values = states(2, 2, 150, 32), states(2, 2, 150, 32, seed=1)
    for item in range(2):
        keys[item, :, first[item] : first[item] + 3] *= 50
    layer.load_prompt(keys, values, None if padding is None else torch.tensor(padding))
    slots = torch.arange(layer.pool.num_slots).expand(2, 2, -1)
    stored_keys, stored_values = layer.scoring.dense(layer.pool.gather(slots), slots, layer.pool)
    positions = layer.pool.positions_of(slots)
    for item in range(2):
        exact, at = (positions[item] >= first[item]) & (positions[item] < first[item] + 3), positions[item]
        assert exact.sum() == 2 * 3
        others = at >= first[item] + 3
        for stored, given in ((stored_keys, keys), (stored_values, values)):
            own = given[item].gather(1, at[..., None].expand(-1, -1, 32))
            assert torch.equal(stored[item][exact], own[exact])
            assert 0 < (stored[item][others] - own[others]).abs().max() < 0.9


def test_padded_sequence_equals_itself_alone() -> None:
    keys, values = states(1, 2, 300, 32), states(1, 2, 300, 32, seed=1)
    alone, padded = make_layer(), make_layer()
    alone.load_prompt(keys, values, None)
    filling = [F.pad(each, (0, 0, 37, 0), value=1e3) for each in (keys, values)]
    # Beside a sequence without encoded tokens
    beside = [torch.cat([each, each.flip(3)]) for each in filling]
    padded.load_prompt(*beside, torch.tensor([37, 320]))
    for side in ("keys", "values"):
        torch.testing.assert_close(padded.to_dense(side)[:1, :, 37:], alone.to_dense(side))


def test_codec_is_fitted_to_each_sequence_with_its_own_tokens() -> None:
    """A sequence of 17 tokens beside one of 337: once enough have followed, its error is as small."""
    layer = make_layer()
    keys, values = states(2, 2, 500, 32), states(2, 2, 500, 32, seed=1)
    keys[1] *= 5
    layer.load_prompt(keys[:, :, :337], values[:, :, :337], torch.tensor([0, 320]))
    for start in range(337, 500):
        layer.update(keys[:, :, start : start + 1], values[:, :, start : start + 1])
    for side, given in (("keys", keys), ("values", values)):
        errors = (layer.to_dense(side) - given)[:, :, 320:460].square().mean(dim=(1, 2, 3))
        errors /= given[:, :, 320:460].square().mean(dim=(1, 2, 3))
        assert errors[1] < 2 * errors[0] < 0.1


def test_a_step_fetches_rows_of_values() -> None:
    layer = make_layer(alpha=float("inf"), max_fetch_ratio=0.25)
    layer.load_prompt(states(1, 2, 400, 64), states(1, 2, 400, 64, seed=1), None)
    layer.update(states(1, 2, 1, 64, seed=2), states(1, 2, 1, 64, seed=3))
    layer.attend(AttentionCall(states(1, 4, 1, 64, seed=4)))
    stats = layer.stats()
    assert stats["tokens_fetched"] == 2 * 100
    # 26 bytes of codes and a scale
    assert stats["bytes_fetched"] == 200 * 27
    assert {part for part, tensor in layer.named_tensors() if tensor.numel()} == {
        *("pool", "spare", "scoring", "scales", "residual", "index")
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e7])
@pytest.mark.parametrize("side", [0, 1])
def test_tokens_that_cannot_be_stored_raise_and_nothing_is_lost(side: int, bad: float) -> None:
    layer = make_layer(recent=8)
    layer.load_prompt(states(1, 2, 100, 32), states(1, 2, 100, 32, seed=1), None)
    before = [layer.to_dense(each).clone() for each in ("keys", "values")]
    new = [states(1, 2, 130, 32, seed=2), states(1, 2, 130, 32, seed=3)]
    new[side][0, 0, 40, 3] = bad
    layer.update(*new)
    with pytest.raises(ValueError, match="layer 0: .*(NaN or infinity|too large)"):
        layer.update(states(1, 2, 1, 32), states(1, 2, 1, 32))
    layer.crop_tokens(130)
    assert all(torch.equal(layer.to_dense(each), old) for each, old in zip(("keys", "values"), before, strict=True))
