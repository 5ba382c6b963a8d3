"""Rows coded and decoded, and keys turned, in C: the bytes and the numbers of plain PyTorch."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kvcache_plugins.codecs.prompt_codec import make_key_format, make_value_format
from kvcache_plugins.codecs.rows import RowCodec, SharedFormats
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import RotaryLayout, candidate_layouts
from kvcache_plugins.formats.rows import LAST_SCALE, KeptRows, RowFormat
from kvcache_plugins.kernels import library
from kvcache_plugins.kernels.attention import prepare_coding
from kvcache_plugins.kernels.ops import apply_rope, channel_moments, decode_rows, encode_rows, requantize_rows

from .kernel_cases import basis_table, make_layout


pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason=library.why_missing() or "")
HEAD_DIMS = (1, 20, 33, 64, 128, 300)
FREQUENCIES = tuple((10000.0 ** -(torch.arange(16) / 16)).tolist())
LAYOUT = candidate_layouts(FREQUENCIES, 48)[0]
AT_START = Positions()


@pytest.fixture
def in_torch(monkeypatch) -> Callable[[Callable[[], torch.Tensor]], torch.Tensor]:
    """Calls a function in plain PyTorch."""

    def run(function: Callable[[], torch.Tensor]) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
            return function()

    return run


@pytest.fixture
def levels(monkeypatch) -> Callable[[], Iterator[str]]:
    """Sets each level of instructions in turn."""

    def levels() -> Iterator[str]:
        for level in library.levels_here():
            monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", level)
            yield level

    return levels


def fitted_tables(states: torch.Tensor, total: int) -> dict[str, RowFormat]:
    layout = RotaryLayout((), "none", 0, states.shape[3])
    valid = torch.ones(states.shape[0], states.shape[2], dtype=torch.bool)
    keys = make_key_format(states, valid, None, [layout], Positions(), total)
    return {"keys": keys, "values": make_value_format(states, valid, total)}


def make_table(head_dim: int, *, is_key: bool, batch_size: int = 1, rope: RotaryLayout | None = None) -> RowFormat:
    blocks = -(-head_dim // 8)
    widths = torch.stack([torch.tensor([6 - (i + head) % 7 for i in range(blocks)]) for head in range(2)])
    widths[1] = widths[1].flip(0)
    # Heads have rows of one size
    widths[1, 0] += widths[0].sum() - widths[1].sum()
    order = torch.stack([torch.randperm(head_dim) for _ in range(2)]).to(torch.uint8)
    return RowFormat(
        order=order.repeat(batch_size, 1, 1) if is_key else None,
        mean=torch.randn(batch_size, 2, head_dim).half() if is_key else None,
        deviation=torch.rand(batch_size, 2, head_dim if is_key else 1).half() + 0.5,
        widths=widths.repeat(batch_size, 1, 1).to(torch.uint8),
        row_size=1 + int(widths[0].sum()),
        head_dim=head_dim,
        is_weighted=is_key,
        rope=rope,
        is_rotated=not is_key,
    )


def check_rows(rows: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums are rounded in another order, which may turn a code or a scale over where two are equally near
    assert float((rows != expected).float().mean()) < 1e-3


def check_coding(in_torch, levels, table, states, positions=AT_START, atol=2e-6, rtol=2e-6) -> None:
    """Compares rows, and what they are decoded to, at all levels with those of plain PyTorch."""
    rows = in_torch(lambda: encode_rows(states, table, positions))
    dense = in_torch(lambda: decode_rows(rows, table, positions))
    for _ in levels():
        check_rows(encode_rows(states, table, positions), rows)
        torch.testing.assert_close(decode_rows(rows, table, positions), dense, atol=atol, rtol=rtol)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_encoded_bytes_equal_pytorch(in_torch, levels, side, head_dim):
    states = torch.randn(2, 2, 301, head_dim) * torch.rand(head_dim) * 5 + torch.randn(head_dim)
    states[:, :, 5] = 0
    states[:, :, 6] *= 1000
    for nbits in (1.5, 4, 8):
        table = fitted_tables(states, max(int(nbits * -(-head_dim // 8)), 3))[side]
        atol = 1e-6 * float(states.abs().max())
        check_coding(in_torch, levels, table, states, atol=atol)


@pytest.mark.parametrize("changes", [{"num_refits": 5}, {"by_energy": True, "is_weighted": False}], ids=str)
def test_fitted_scales_equal_pytorch(in_torch, levels, changes):
    table = dataclasses.replace(make_table(64, is_key=True), **changes)
    states = torch.randn(1, 2, 70, 64) * torch.randn(1, 2, 70, 1).exp()
    check_coding(in_torch, levels, table, states, atol=1e-6 * float(states.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_rotations_are_encoded_as_in_pytorch(in_torch, levels, is_key, dtype):
    table = make_table(48, is_key=is_key, batch_size=2, rope=LAYOUT if is_key else None)
    # Not contiguous
    states = torch.randn(2, 130, 2, 48).to(dtype).transpose(1, 2)
    positions = Positions(40, torch.tensor([0, 70]))
    check_coding(in_torch, levels, table, states, positions, atol=4e-6 if is_key else 2e-6)


@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(("length", "head_dim"), [(1, 32), (300, 64), (63, 20)])
def test_rows_are_decoded_as_in_pytorch(in_torch, levels, is_key, length, head_dim):
    table = make_table(head_dim, is_key=is_key)
    tables = [table] if is_key else [table, dataclasses.replace(table, is_rotated=False)]
    rows = encode_rows(torch.randn(1, 2, length + 3, head_dim), table)[:, :, 3:]
    expected = in_torch(lambda: torch.stack([decode_rows(rows, each) for each in tables]))
    for _ in levels():
        own = torch.stack([decode_rows(rows, each) for each in tables])
        torch.testing.assert_close(own, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("number", range(len(candidate_layouts(FREQUENCIES, 48))))
@pytest.mark.parametrize("is_back", [True, False])
def test_rope_equals_pytorch(in_torch, levels, number, is_back):
    layout, turn = candidate_layouts(FREQUENCIES, 48)[number], partial(apply_rope, inverse=is_back)
    keys = torch.randn(2, 3, 100, 48).transpose(1, 2).contiguous().transpose(1, 2)
    positions = Positions(40, torch.tensor([0, 70]))
    expected = in_torch(lambda: turn(keys, layout, positions))
    for _ in levels():
        turned = turn(keys, layout, positions)
        torch.testing.assert_close(turned, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moments_equal_pytorch(in_torch, levels, dtype):
    """Little about large means, of tokens that count alone, as of one sequence none do."""
    positions = Positions(40, torch.tensor([0, 70, 3]))
    valid = torch.rand(3, 1300) >= torch.tensor([[0.0], [0.4], [1.0]])
    states = (torch.randn(3, 1300, 2, 48) + 20 * torch.randn(48)).to(dtype).transpose(1, 2)
    states[1, :, ~valid[1]], states[0, :, :, 5] = torch.nan, 2.5
    for layout in (None, *candidate_layouts(FREQUENCIES, 48)):
        expected = in_torch(lambda layout=layout: channel_moments(states, valid, layout, positions))
        for _ in levels():
            found = channel_moments(states, valid, layout, positions)
            torch.testing.assert_close(found, expected, atol=4e-5, rtol=1e-5)
            is_turned = layout is not None and layout.frequencies
            assert is_turned or bool((found[0][0, :, 5] == 2.5).all() and (found[1][0, :, 5] == 0).all())


def test_rope_depends_on_the_position_only(levels):
    layout, keys = candidate_layouts(FREQUENCIES, 32)[0], torch.randn(1, 2, 90, 32)
    for _ in levels():
        whole = apply_rope(keys, layout, Positions(5), inverse=True)
        part = apply_rope(keys[:, :, 17:], layout, Positions(30, torch.tensor([8])), inverse=True)
        assert torch.equal(part, whole[:, :, 17:])


def test_rows_depend_on_their_token_only(levels, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    table = make_table(48, is_key=True, batch_size=3, rope=LAYOUT)
    states, padding = torch.randn(3, 2, 300, 48), torch.tensor([0, 3, 17])
    positions = Positions(4, padding)
    one = table.map(lambda tensor: tensor[2:])
    for _ in levels():
        rows = encode_rows(states, table, positions)
        part = encode_rows(states[2:, :, 101:], one, Positions(105, padding[2:]))
        assert torch.equal(part, rows[2:, :, 101:])
        dense = decode_rows(rows, table, positions)
        torch.set_num_threads(2)
        assert torch.equal(encode_rows(states, table, positions), rows)
        assert torch.equal(decode_rows(rows, table, positions), dense)
        torch.set_num_threads(1)


def test_forged_formats_stay_in_bounds(levels):
    table, states = make_table(48, is_key=True, rope=LAYOUT), torch.randn(1, 2, 9, 48)
    assert table.order is not None
    far = Positions(5, torch.tensor([10**12]))
    for order in (torch.full_like(table.order, 255), torch.full_like(table.order, -3, dtype=torch.int16)):
        for width in (0, 7, 255):
            forged = dataclasses.replace(table, order=order, widths=torch.full_like(table.widths, width))
            for _ in levels():
                rows = encode_rows(states, forged, far)
                assert bool(decode_rows(rows, forged, far).isfinite().all())


def test_other_shapes_are_refused():
    table = make_table(48, is_key=True)
    for shape in ((1, 2, 9, 40), (1, 3, 9, 48)):
        with pytest.raises(ValueError, match="`states` of . heads of .., a format of 2 of 48"):
            encode_rows(torch.randn(shape), table)
    with pytest.raises(ValueError, match="`valid` has to be 1 x 9 of torch.bool"):
        channel_moments(torch.randn(1, 2, 9, 48), torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="`rows` has to be 1 x 2 x 9 x"):
        decode_rows(torch.zeros(1, 2, 9, 5, dtype=torch.uint8), table)
    with pytest.raises(ValueError, match="keys of 40 channels, a rotary embedding of 48"):
        apply_rope(torch.randn(1, 2, 9, 40), LAYOUT, Positions(), inverse=True)
    with pytest.raises(ValueError, match="`padding` has to be 2"):
        apply_rope(torch.randn(2, 2, 9, 48), LAYOUT, Positions(0, torch.zeros(3)), inverse=True)


@pytest.mark.parametrize("length", [0, 3])
def test_heads_at_and_above_the_channel_limit_equal_pytorch(in_torch, length):
    for head_dim in (640, 648):
        states = torch.randn(1, 1, length, head_dim)
        table = fitted_tables(torch.randn(1, 1, 50, head_dim), 200)["keys"]
        rows = encode_rows(states, table)
        assert torch.equal(rows, in_torch(lambda table=table, states=states: encode_rows(states, table)))
        assert decode_rows(rows, table).shape == states.shape


@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize(("head_dim", "total"), [(20, 3), (48, 21), (64, 45)])
def test_bases_are_encoded_as_in_pytorch(in_torch, levels, head_dim, total, is_key):
    table = basis_table(3, head_dim, total, make_layout(head_dim, "half-split") if is_key else None)
    states, positions = torch.randn(2, 3, 150, head_dim) + 1, Positions(40, torch.tensor([0, 70]))
    check_coding(in_torch, levels, table, states, positions, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["tables", "basis"])
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_rows_are_requantized_as_in_pytorch(in_torch, levels, is_key, kind):
    if kind == "basis":
        table = basis_table(2, 48, 21, LAYOUT if is_key else None)
    else:
        table = make_table(48, is_key=is_key, rope=LAYOUT if is_key else None)
    finer = table.with_more_bits(2)
    rows = encode_rows(torch.randn(1, 2, 40, 48) + 1, finer)
    expected, states = in_torch(lambda: requantize_rows(rows, finer, table)), decode_rows(rows, finer)
    # Encoding decoded rows again gives their bytes: the mean, the rope and the rotation cancel out
    assert kind == "basis" or float((encode_rows(states, table) != expected).float().mean()) < 2e-3
    for _ in levels():
        check_rows(requantize_rows(rows, finer, table), expected)


def make_codec(batch_size: int = 2) -> RowCodec:
    tables = (
        make_table(48, is_key=is_key, batch_size=batch_size, rope=LAYOUT if is_key else None)
        for is_key in (True, False)
    )
    return RowCodec(tuple(tables))


def make_rows(codec: RowCodec, capacity: int, batch_size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (torch.full((batch_size, 2, capacity, table.row_size), 99).byte() for table in codec.formats())
    return keys, values


def kept(rows: tuple[torch.Tensor, torch.Tensor], length: int) -> KeptRows:
    return KeptRows(rows, 0, length, rows[0].shape[2])


@pytest.mark.parametrize("form", ["tables", "basis"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padding", [None, torch.tensor([0, 7])], ids=["", "padded"])
def test_rows_are_appended_repeatedly(levels, dtype, padding, form, monkeypatch):
    """Append to storage that grows or stays: the oldest rows become older ones, and later tokens move to the front."""
    # Tables of angles end among the tokens of an append
    monkeypatch.setattr("kvcache_plugins.kernels.c_formats._LEAST_TILES", 1)
    bases = (basis_table(2, 48, total, rope) for total, rope in ((21, LAYOUT), (13, None)))
    older = make_codec() if form == "tables" else RowCodec(SharedFormats(*bases))
    codec = older.with_more_bits(2)
    for _ in levels():
        states = tuple(torch.randn(2, 2, 2, 64, 48).to(dtype))
        coding = prepare_coding(codec.formats(), older.formats(), states[0], padding, 1e10)
        rows, old = make_rows(codec, 20), make_rows(older, 9)
        done, first, num_old = 0, 40, 3
        for count, num_left, num_aged in ((1, 0, 0), (4, 3, 0), (4, 60, 0), (64, 0, 5), (1, 2, 0), (30, 9, 64)):
            if count == 30:
                states = tuple(each.clone() for each in states)
            before, now = [each.clone() for each in states], [each[:, :, :count].clone() for each in states]
            new = KeptRows(rows, num_aged, done - num_aged, max(done - num_aged + count, 20))
            aged = KeptRows(old, 0, num_old, num_old + num_aged) if num_aged else None
            made = coding.append(states, count, first, new, num_left, aged)
            expected = codec.encode(*now, Positions(first, padding))
            again = older.requantize(tuple(each[:, :, :num_aged] for each in rows), 2)
            for side in (0, 1):
                assert torch.equal(states[side][:, :, :num_left], before[side][:, :, count : count + num_left])
                parts = rows[side][:, :, num_aged:done], expected[side], made[side][:, :, new.length + count :]
                assert torch.equal(made[side], torch.cat(parts, dim=2)) and made[side].shape[2] == new.capacity
                assert set(parts[2].unique().tolist()) <= {0, 99}
                if num_aged:
                    assert torch.equal(made[2 + side], torch.cat((old[side][:, :, :num_old], again[side]), dim=2))
            rows, old, num_old = tuple(made[:2]), tuple(made[2:]) or old, num_old + num_aged
            done, first = new.length + count, first + count


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2e10, -2e10])
def test_append_reports_overflow(levels, number):
    codec = make_codec()
    for _ in levels():
        for side in (0, 1):
            states = tuple(torch.randn(2, 2, 2, 5, 48))
            coding = prepare_coding(codec.formats(), codec.formats(), states[0], None, 1e10)
            rows = kept(make_rows(codec, 9), 0)
            assert coding.append(states, 5, 0, rows)
            states[side][1, 0, 4, 47] = number
            assert coding.append(states, 4, 0, rows) and not coding.append(states, 5, 0, rows)
            # Up to the largest scale, and beyond
            states[side][1, 0, 3] = 1e9
            before = states[0][:, :, :4].clone()
            assert not coding.append(states, 4, 0, rows, 1)
            assert rows.rows[side][1, 0, 3, 0] == LAST_SCALE and torch.equal(before, states[0][:, :, :4])


@pytest.mark.parametrize("number", [60.0, -60.0])
def test_append_reports_numbers_beyond_the_limit(levels, number):
    """Numbers that scales reach."""
    codec = make_codec()
    for _ in levels():
        for side in (0, 1):
            states = tuple(torch.randn(2, 2, 2, 5, 48))
            coding = prepare_coding(codec.formats(), codec.formats(), states[0], None, 50.0)
            rows = kept(make_rows(codec, 9), 0)
            states[side][1, 0, 4, 47] = number / 2
            assert coding.append(states, 5, 0, rows)
            states[side][1, 0, 4, 47] = number
            assert coding.append(states, 4, 0, rows) and not coding.append(states, 5, 0, rows)


def test_append_stays_within_its_storage():
    codec, states = make_codec(), tuple(torch.randn(2, 2, 2, 5, 48))
    coding, rows = prepare_coding(codec.formats(), codec.formats(), states[0], None, 1e10), make_rows(codec, 9)
    for length in (-1, 5, 9):
        with pytest.raises(ValueError, match=f"5 tokens behind rows 0 to {length} of 9"):
            coding.append(states, 5, 0, kept(rows, length))
    for other in (each.transpose(0, 1) for each in rows), (each[..., 1:].contiguous() for each in rows):
        with pytest.raises(ValueError, match="`rows` has to be"):
            coding.append(states, 5, 0, kept(tuple(other), 0))
    for other, message in (
        ((each.transpose(2, 3).contiguous().transpose(2, 3) for each in states), "tokens in torch.float32, strides"),
        ((each.double() for each in states), "tokens in torch.float64"),
        ((each[..., :40].contiguous() for each in states), "keys of 40 channels"),
        ((each[:, :, :4].contiguous() for each in states), "5 tokens and 0 behind them"),
    ):
        with pytest.raises(ValueError, match=message):
            coding.append(tuple(other), 5, 0, kept(rows, 0))
    with pytest.raises(ValueError, match="5 tokens and 1 behind them"):
        coding.append(states, 5, 0, kept(rows, 0), 1)
    with pytest.raises(ValueError, match="6 tokens behind rows 0 to 0 of 9 in 5"):
        coding.append(states, 3, 0, KeptRows(rows, 6, 3, 9), 1, KeptRows(rows, 0, 0, 5))


@pytest.mark.parametrize(
    "states", [torch.zeros(1, 2, 5, 48, device="meta"), torch.zeros(1, 2, 5, 48).double()], ids=["meta", "float64"]
)
def test_states_without_a_kernel_are_not_prepared(states):
    codec = make_codec(batch_size=1)
    assert prepare_coding(codec.formats(), codec.formats(), states, None, 1e10) is None
