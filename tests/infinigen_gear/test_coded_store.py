"""What a layer holds and hands out whose store is one of codes, against plain references."""

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen_gear.coded_store import CodedStore
from kvcache_plugins.infinigen_gear.config import CodingConfig
from kvcache_plugins.infinigen_gear.grouped_keys import GroupedKeys
from kvcache_plugins.infinigen_gear.value_rows import ValueRows


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(key_nbits=4, value_nbits=4, q_group_size=None, **options) -> InfiniGenLayer:
    coding = CodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, q_group_size=q_group_size)
    config = InfiniGenConfig(**options)
    return InfiniGenLayer(config, 0, store=CodedStore(config, coding, 0))


def quantized(keys: torch.Tensor, nbits: int, group_size: int) -> torch.Tensor:
    """Keys `[B, H, whole groups, D]` as their codes stand for them, step by step."""
    groups = keys.unflatten(2, (-1, group_size))
    zero = groups.amin(dim=3, keepdim=True).half().float()
    step = ((groups.amax(dim=3, keepdim=True) - zero) / (2**nbits - 1)).half().float()
    return (zero + step * ((groups - zero) / step).round().clamp(0, 2**nbits - 1)).flatten(2, 3)


@pytest.mark.parametrize("nbits", [2, 4, 8])
@pytest.mark.parametrize("count", [128, 131, 63, 1])
def test_keys_are_grouped_from_their_end(count: int, nbits: int) -> None:
    keys = states(2, 3, count, 20)
    stored = GroupedKeys(CodingConfig(key_nbits=nbits, value_nbits=4, q_group_size=None).key, 64)
    stored.add(stored.encode(keys), count)
    slots = torch.arange(count).expand(2, 3, -1)
    first = count % 64
    expected = torch.cat(
        [
            *([quantized(keys[:, :, :first], nbits, first)] if first > 1 else [keys[:, :, :first]]),
            *([quantized(keys[:, :, first:], nbits, 64)] if count >= 64 else []),
        ],
        dim=2,
    )
    torch.testing.assert_close(stored.decode(slots), expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_scores_are_products_with_the_decoded_keys(nbits: int, every_scoring_kernel: str) -> None:
    stored = GroupedKeys(CodingConfig(key_nbits=nbits, value_nbits=4, q_group_size=None).key, 64)
    keys, query = states(2, 3, 200, 48), states(2, 3, 2, 48, seed=1)
    # An offset of a channel that is far larger than what tells tokens apart
    keys[..., 5] += 30
    slots = torch.arange(200).expand(2, 3, -1)
    for start, stop in ((0, 70), (70, 134), (134, 200)):
        stored.add(stored.encode(keys[:, :, start:stop]), stop - start)
        if stop == 70:
            # Dropped in the middle of a group, and written anew
            stored.truncate(40)
            stored.add(stored.encode(keys[:, :, 40:70]), 30)
    decoded = stored.decode(slots)
    assert (decoded - keys).abs().max() < {2: 2.5, 4: 0.5, 8: 0.05}[nbits]
    expected = query @ decoded.transpose(2, 3)
    actual = stored.scores(query)
    assert actual.shape == (2, 3, 2, 200)
    torch.testing.assert_close(actual, expected, atol=5e-3 if nbits == 8 else 2e-3, rtol=1e-4)


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (80, 16), (24, 8)])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_values_are_rows_that_need_no_other(nbits: int, head_dim: int, group_size: int) -> None:
    rows = ValueRows(CodingConfig(key_nbits=4, value_nbits=nbits, q_group_size=None).value, head_dim, group_size)
    values = states(2, 3, 50, head_dim)
    encoded = rows.encode(values)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (2, 3, 50, -(-head_dim * nbits // 8) + 4 * head_dim // group_size)
    step = (values.amax() - values.amin()) / (2**nbits - 1)
    assert (rows.decode(encoded) - values).abs().max() < step * 2
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(rows.decode(encoded[:, :, order]), rows.decode(encoded)[:, :, order])
    assert torch.equal(rows.encode(values[:, :, 7:9]), encoded[:, :, 7:9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padding", [None, [0, 5], [70, 0]], ids=str)
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "key_nbits", "value_nbits"), [(64, 64, 4, 4), (80, 48, 2, 3), (16, 24, 8, 2)]
)
def test_compiled_code_widens_what_plain_pytorch_does(
    key_dim: int, value_dim: int, key_nbits: int, value_nbits: int, padding: list[int] | None, dtype: torch.dtype
) -> None:
    pytest.importorskip("numba")
    layer = make_layer(key_nbits, value_nbits)
    keys, values = (states(2, 3, 1200, dim).to(dtype) for dim in (key_dim, value_dim))
    layer.take_prompt(keys, values, None if padding is None else torch.tensor(padding))
    generator = torch.Generator().manual_seed(1)
    slots = torch.stack([torch.randperm(1168, generator=generator)[:500] for _ in range(6)]).view(2, 3, -1)
    # Sink tokens among them
    slots[:, :, :6] = torch.tensor([0, 3, 4, 5, 70, 73])
    count = torch.tensor([[500, 3, 0], [499, 6, 500]])
    store = layer.tokens.store
    expected, actual = store.dense_rows(layer.pool.gather(slots), slots), store.widen(slots, count)
    assert actual.dtype == dtype
    counted = torch.arange(500) < count[..., None]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(actual[counted], expected[counted], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("padding", [None, [0, 9]], ids=str)
def test_sink_tokens_are_exact_and_in_no_range(padding: list[int] | None) -> None:
    layer, first = make_layer(sink=3), padding or [0, 0]
    keys, values = states(2, 2, 150, 32), states(2, 2, 150, 32, seed=1)
    for item in range(2):
        keys[item, :, first[item] : first[item] + 3] *= 50
    layer.take_prompt(keys, values, None if padding is None else torch.tensor(padding))
    stored_keys, stored_values = layer.materialize("keys"), layer.materialize("values")
    for item in range(2):
        sinks = slice(first[item], first[item] + 3)
        assert torch.equal(stored_keys[item, :, sinks], keys[item, :, sinks])
        assert torch.equal(stored_values[item, :, sinks], values[item, :, sinks])
        others = slice(first[item] + 3, 118)
        assert 0 < (stored_keys[item, :, others] - keys[item, :, others]).abs().max() < 0.4


def test_an_item_is_the_same_alone_and_padded() -> None:
    keys, values = states(1, 2, 300, 32), states(1, 2, 300, 32, seed=1)
    alone, padded = make_layer(), make_layer()
    alone.take_prompt(keys, values, None)
    filled = [F.pad(each, (0, 0, 37, 0), value=1e3).repeat(2, 1, 1, 1) for each in (keys, values)]
    padded.take_prompt(*filled, torch.tensor([37, 37]))
    for side in ("keys", "values"):
        expected = alone.materialize(side)
        for item in range(2):
            assert torch.equal(padded.materialize(side)[item : item + 1, :, 37:], expected)


def test_what_a_step_fetches_are_codes_of_values() -> None:
    layer = make_layer(share=0.25, max_fetch_ratio=0.25)
    layer.take_prompt(states(1, 2, 400, 64), states(1, 2, 400, 64, seed=1), None)
    layer.update(states(1, 2, 1, 64, seed=2), states(1, 2, 1, 64, seed=3))
    layer.attend(states(1, 4, 1, 64, seed=4), None, is_causal=False, scale=None)
    stats = layer.stats()
    assert stats["tokens_fetched"] == 2 * 100
    # 32 bytes of codes, a step and a minimum
    assert stats["bytes_fetched"] == 200 * 36
    assert {part for part, tensor in layer.named_tensors() if tensor.numel()} == {
        *("pool", "spare", "scoring", "residual", "index")
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e7])
@pytest.mark.parametrize("side", [0, 1])
def test_what_cannot_be_stored_is_said_and_nothing_lost(side: int, bad: float) -> None:
    layer = make_layer(recent=8)
    layer.take_prompt(states(1, 2, 100, 16), states(1, 2, 100, 16, seed=1), None)
    before = [layer.materialize(each).clone() for each in ("keys", "values")]
    new = [states(1, 2, 130, 16, seed=2), states(1, 2, 130, 16, seed=3)]
    new[side][0, 0, 40, 3] = bad
    layer.update(*new)
    with pytest.raises(ValueError, match="layer 0: .*(NaN or infinity|float16)"):
        layer.update(states(1, 2, 1, 16), states(1, 2, 1, 16))
    layer.crop_tokens(130)
    assert all(torch.equal(layer.materialize(each), old) for each, old in zip(("keys", "values"), before, strict=True))
