"""What a layer holds and hands out whose store is one of codes, against plain references."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.infinigen import disk_pages
from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.selection import Selection
from kvcache_plugins.infinigen_gear.coded_layer import CodedLayer, ValueRows
from kvcache_plugins.infinigen_gear.config import CodingConfig
from kvcache_plugins.infinigen_gear.grouped_keys import GroupedKeys
from kvcache_plugins.kernels.attention_call import AttentionCall


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(key_nbits=4, value_nbits=4, q_group_size=None, **options) -> CodedLayer:
    coding = CodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, q_group_size=q_group_size)
    config = InfiniGenConfig(**options)
    return CodedLayer(config, 0, coding=coding)


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
    stored = GroupedKeys(CodingConfig(key_nbits=nbits, value_nbits=4, q_group_size=None).key_codec(keys.shape[3]))
    stored.append(stored.encode_groups(keys)[0])
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
    stored = GroupedKeys(CodingConfig(key_nbits=nbits, value_nbits=4, q_group_size=None).key_codec(48))
    keys, query = states(2, 3, 200, 48), states(2, 3, 2, 48, seed=1)
    # An offset of a channel that is far larger than what tells tokens apart
    keys[..., 5] += 30
    slots = torch.arange(200).expand(2, 3, -1)
    for start, stop in ((0, 70), (70, 134), (134, 200)):
        stored.append(stored.encode_groups(keys[:, :, start:stop])[0])
        if stop == 70:
            # Dropped in the middle of a group, and written anew
            stored.truncate(40)
            stored.append(stored.encode_groups(keys[:, :, 40:70])[0])
    decoded = stored.decode(slots)
    assert (decoded - keys).abs().max() < {2: 2.5, 4: 0.5, 8: 0.05}[nbits]
    expected = query @ decoded.transpose(2, 3)
    actual = stored.scores(query)
    assert actual.shape == (2, 3, 2, 200)
    torch.testing.assert_close(actual, expected, atol=5e-3 if nbits == 8 else 2e-3, rtol=1e-4)


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (80, 16), (24, 8)])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_values_are_rows_that_need_no_other(nbits: int, head_dim: int, group_size: int) -> None:
    rows = ValueRows(CodingConfig(key_nbits=4, value_nbits=nbits, q_group_size=group_size).value_codec(head_dim))
    values = states(2, 3, 50, head_dim)
    encoded, fits = rows.encode(values)
    assert fits
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (2, 3, 50, -(-head_dim * nbits // 8) + 4 * head_dim // group_size)
    step = (values.amax() - values.amin()) / (2**nbits - 1)
    assert (rows.decode(encoded) - values).abs().max() < step * 2
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(rows.decode(encoded[:, :, order]), rows.decode(encoded)[:, :, order])
    assert torch.equal(rows.encode(values[:, :, 7:9])[0], encoded[:, :, 7:9])


@dataclass(frozen=True)
class Case:
    """What is attended to: bits, head dims, queries a head, and how the tokens came there."""

    key_nbits: int = 4
    value_nbits: int = 4
    q_group_size: int | None = None
    key_dim: int = 64
    value_dim: int = 64
    num_heads: int = 3
    groups: int = 3
    padding: tuple[int, int] | None = None
    sink: int = 4
    # Tokens that are dropped, and added anew, after the prompt
    cropped: int = 0
    count: int = 700


CASES = {
    "as by default": Case(),
    "2 and 3 bits, head dims that vectors do not divide": Case(2, 3, key_dim=84, value_dim=20, groups=5),
    "8 and 2 bits, one head, nine queries": Case(8, 2, key_dim=16, value_dim=24, num_heads=1, groups=9),
    "few bytes a token, no groups of queries": Case(2, 8, key_dim=12, value_dim=48, num_heads=5, groups=1),
    "groups of 8": Case(4, 3, q_group_size=8, value_dim=80),
    "left padding": Case(4, 2, padding=(0, 70), value_dim=128, groups=4),
    "left padding of all but the window": Case(padding=(5, 675)),
    "several runs of tokens": Case(2, 4, cropped=100, padding=(3, 0)),
    "no sink tokens": Case(sink=0),
    "few tokens": Case(count=35, groups=2),
}


def stored_case(case: Case, dtype: torch.dtype = torch.float32, folder: Path | None = None) -> CodedLayer:
    """A layer of two items, with a window."""
    bits = case.key_nbits, case.value_nbits, case.q_group_size
    layer = make_layer(*bits, sink=case.sink, pool_folder=folder)
    size = 2, case.num_heads, case.count
    keys, values = (states(*size, dim, seed=dim).to(dtype) for dim in (case.key_dim, case.value_dim))
    layer.take_prompt(keys, values, None if case.padding is None else torch.tensor(case.padding))
    if case.cropped:
        for seed in (1, 2):
            layer.crop_tokens(case.cropped)
            new = (states(2, case.num_heads, 170, dim, seed=seed).to(dtype) for dim in (case.key_dim, case.value_dim))
            layer.update(*new)
            layer._before_update()
        assert len(layer.scoring.stored().runs) == 3
    return layer


def random_choice(layer: CodedLayer) -> Selection:
    """Slots in any order, sink tokens of some among them; of the first head all, and of the last none."""
    num_slots, shape = layer.pool.num_slots, layer.window.keys.shape[:2]
    generator = torch.Generator().manual_seed(3)
    slots = torch.stack([torch.randperm(num_slots, generator=generator) for _ in range(shape.numel())])
    count = torch.randint(0, num_slots + 1, shape, generator=generator)
    count.view(-1)[0], count.view(-1)[-1] = num_slots, 0
    return Selection(slots.view(*shape, -1), count)


def exact_attention(layer: CodedLayer, query: torch.Tensor, choice: Selection, scale, mask) -> torch.Tensor:
    """Head by head in float64, of what the codes stand for."""
    window, slots = layer.window, choice.slots
    dense = layer.scoring.decode(slots), layer._value_rows.decode(layer.pool.gather(slots))
    keys, values = (side.double() for side in layer.sinks.restore(*dense, slots))
    output = torch.zeros(*query.shape[:3], values.shape[3], dtype=torch.double)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            count = choice.count[b, h]
            own_keys = torch.cat([keys[b, h, :count], window.keys[b, h].double()])
            own_values = torch.cat([values[b, h, :count], window.values[b, h].double()])
            scores = query[b, h].double() @ own_keys.T * scale
            if mask is not None:
                columns = torch.cat([slots[b, h, :count], torch.arange(layer.num_pooled, mask.shape[1])])
                line = mask[b, columns]
                scores = scores + (line if line.dtype != torch.bool else torch.where(line, 0.0, -torch.inf))
            output[b, h] = scores.softmax(dim=1).nan_to_num() @ own_values
    return output


def check_attention(layer: CodedLayer, groups: int, mask: torch.Tensor | None = None, scale=0.3) -> torch.Tensor:
    choice = random_choice(layer)
    window = layer.window.keys, layer.window.values
    query = states(*window[0].shape[:2], groups, window[0].shape[3], seed=5).to(window[0].dtype)
    rows = None if mask is None else mask[:, None, None]
    output, kernel, is_fallback = layer.attend_selection(query, choice, None, rows, scale)
    assert (kernel, is_fallback) == ("compiled", False)
    assert output.dtype == query.dtype
    expected = exact_attention(layer, query, choice, scale, mask)
    # The output is rounded, and nothing else
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[query.dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    return output


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")


@pytest.mark.usefixtures("compiled")
class TestAttention:
    @pytest.mark.parametrize("name", CASES)
    def test_is_that_over_what_codes_stand_for(self, name: str) -> None:
        check_attention(stored_case(CASES[name]), CASES[name].groups)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", ["as by default", "left padding"])
    def test_of_models_in_half_precision(self, name: str, dtype: torch.dtype) -> None:
        check_attention(stored_case(CASES[name], dtype), CASES[name].groups)

    @pytest.mark.parametrize("is_boolean", [True, False])
    @pytest.mark.parametrize("name", ["left padding", "groups of 8", "several runs of tokens"])
    def test_under_a_mask(self, name: str, is_boolean: bool) -> None:
        layer = stored_case(CASES[name])
        mask = states(2, layer.get_seq_length(), seed=7)
        check_attention(layer, CASES[name].groups, mask > 0 if is_boolean else mask)

    def test_nothing_to_attend_to_is_zero(self) -> None:
        layer = stored_case(CASES["left padding"])
        mask = torch.ones(2, layer.get_seq_length(), dtype=torch.bool)
        mask[1] = False
        output = check_attention(layer, 4, mask)
        assert (output[0] != 0).any() and (output[1] == 0).all()

    def test_scores_of_any_size(self) -> None:
        check_attention(stored_case(CASES["as by default"]), 3, scale=60.0)

    def test_pages_on_disk_are_let_go_of(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        released = []
        monkeypatch.setattr(disk_pages, "release", lambda page: released.append(page.data_ptr()))
        layer = stored_case(replace(CASES["as by default"], count=2100), folder=tmp_path)
        choice = random_choice(layer)
        released.clear()
        layer.attend_selection(states(2, 3, 3, 64), choice, None, None, 0.1)
        assert released == [page.data_ptr() for page in layer.pool.pages] and len(released) == 3
        check_attention(layer, 3)

    def test_threads_do_not_change_a_bit(self) -> None:
        layer, outputs = stored_case(CASES["2 and 3 bits, head dims that vectors do not divide"]), []
        before = torch.get_num_threads()
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(check_attention(layer, 5))
        torch.set_num_threads(before)
        assert torch.equal(*outputs)


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
    layer.attend(AttentionCall(states(1, 4, 1, 64, seed=4)))
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
