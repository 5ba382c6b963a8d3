"""Triton's kernels over rows, of prompts' tables and of calibrated bases: attention and coding against plain PyTorch.

They run in Triton's interpreter or on a GPU, or compiled in an emulator: `test_executed.py`.
"""

import dataclasses

import pytest
import torch
from kernel_cases import DEVICE, Rows, exact_attention, make_query, needs_triton, row_states

from kvcache_plugins.eval.kernel_check import plain_pytorch
from kvcache_plugins.formats.parts import DensePart, RowPart, SelectableRows, SinkStates
from kvcache_plugins.formats.quantizer import level_tables
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.ops import decode_rows
from kvcache_plugins.kernels.triton import TOO_LARGE, codebook_of, has_room, keep_attention, prepare_part, score_rows


pytestmark = needs_triton
# Relative RMS error of attention. The reference rounds nothing, rows in bases are rounded products
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
# Share of coded rows that may differ, as a number lies at a bound of rounding or a scale between two steps; and their
# relative error when decoded
MOST_DIFFERENT, SAME_ERROR = 0.005, 1e-3
HALVES = [torch.float16, torch.bfloat16]
LAYOUTS = ["interleaved", "partial", "none"]
CASES = {
    "smollm2": Rows(1, 3, 3, 1, 65, 64, 64, 19, 16),
    "one-token": Rows(1, 1, 1, 1, 1, 64, 64, 19, 16),
    "widest": Rows(2, 1, 2, 4, 70, 32, 32, 32, 32),
    "no-bits-for-most": Rows(1, 1, 8, 1, 70, 128, 128, 5, 3),
    "least": Rows(1, 2, 3, 3, 63, 8, 8, 3, 3),
    "unlike-dims": Rows(1, 2, 4, 5, 66, 80, 48, 30, 6),
    "odd-dims": Rows(1, 2, 1, 16, 65, 20, 33, 12, 20),
    # More rows than a program has
    "many-rows": Rows(1, 1, 5, 13, 67, 32, 32, 12, 8),
}
# Rows of more than 256 channels are not coded
ATTENTION = {
    "wide-order": Rows(1, 1, 2, 2, 40, 300, 256, 64, 64),
    "splits": Rows(1, 1, 3, 1, 200, 16, 16, 5, 4),
    # Codes of 80 values with 3.2 bits are as many bytes as those of a tile's 128 numbers with two
    "d80": Rows(1, 1, 2, 1, 66, 80, 80, 40, 32),
}
CODING = {"d256": Rows(1, 1, 1, 1, 5, 256, 256, 128, 100), "d96": Rows(1, 1, 1, 1, 9, 96, 96, 48, 36)}
LONG_CODING = {"many": Rows(2, 2, 1, 1, 129, 64, 64, 32, 26)}
ALL = {**CASES, **ATTENTION, **CODING, **LONG_CODING}
FORMS = ["tables", "basis"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def on_device(codec):
    # Tables that caches share are moved by themselves
    return codec if codec.formats()[0].basis is not None else codec.map(lambda tensor: tensor.to(DEVICE))


def make_part(case, form="tables", length=None, **options):
    """Rows of random tokens, that begin at any byte of memory and end with it."""
    keys, values, codec, positions = row_states(ALL[case], form, **options)
    rows = codec.encode(keys, values, positions)
    rows = [torch.cat([each.new_zeros(3), each.flatten()])[3:].view_as(each).to(DEVICE) for each in rows]
    padding = None if positions.padding is None else positions.padding.to(DEVICE)
    positions = dataclasses.replace(positions, padding=padding)
    return RowPart(*rows, on_device(codec).formats(DEVICE), positions, length or ALL[case].length, None)


def check_attention(case, parts, dtype=torch.float32, query=None):
    query = (make_query(ALL[case]).to(DEVICE) if query is None else query).to(dtype)
    if not all(has_room(part.formats, DEVICE, dtype) for part in parts if isinstance(part, RowPart)):
        pytest.skip(f"{TOO_LARGE}: {case}")
    expected = exact_attention(query, parts, ALL[case].num_heads)
    output = attend(query, iter(parts), ALL[case].num_heads, None, "triton")
    assert output.dtype == dtype and output.shape == expected.shape
    assert (output.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


@pytest.mark.each_value
@pytest.mark.parametrize("case", [*CASES, "wide-order"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_equals_pytorch(form, case):
    check_attention(case, [make_part(case, form)])


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("case", "length", "padding"),
    [("smollm2", 65, None), ("one-token", 1, None), ("unlike-dims", 43, None), ("widest", 70, [0, 40])],
)
@pytest.mark.parametrize("form", FORMS)
def test_scores_equal_pytorch(form, case, length, padding):
    part, sizes = make_part(case, form, padding=padding), ALL[case]
    query = torch.randn(sizes.batch_size, sizes.num_heads, sizes.groups, sizes.key_dim, device=DEVICE)
    none = [query[:, :, :0], query[:, :, :0, : sizes.value_dim]]
    tokens = SelectableRows(
        part.keys, length, [], part.formats, part.positions, SinkStates(part.positions.padding, *none)
    )
    scores = score_rows(query, tokens)
    keys = decode_rows(part.keys, part.formats[0], part.positions)[:, :, :length].double()
    expected = query.double() @ keys.mT
    assert scores.shape == expected.shape and scores.dtype == torch.float32
    # Relative to the lengths of query and key, as the products in the sum of a score may cancel
    lengths = query.double().norm(dim=3, keepdim=True) * keys.norm(dim=3)[:, :, None]
    assert (scores.double() - expected).norm() < 5e-4 * lengths.norm()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ["smollm2", "unlike-dims", pytest.param("d80", marks=pytest.mark.long)])
@pytest.mark.parametrize("form", FORMS)
def test_attention_in_half_precision_equals_pytorch(form, case, dtype):
    check_attention(case, [make_part(case, form)], dtype)


@pytest.mark.parametrize(("case", "has_two_bits"), [("smollm2", True), ("d80", False)])
def test_only_values_of_two_bits_are_looked_up(case, has_two_bits):
    part, sizes = make_part(case), ALL[case]
    rows = torch.zeros(1, sizes.num_heads, sizes.groups, sizes.key_dim, dtype=torch.float16, device=DEVICE)
    assert prepare_part(rows, part, 1.0, packed=True).launch.arguments["TWO_BITS"] is has_two_bits


def test_means_of_values_are_added():
    part = make_part("unlike-dims")
    keys, values = part.formats
    mean = torch.randn(*part.values.shape[:2], values.head_dim, device=DEVICE)
    formats = keys, dataclasses.replace(values, mean=mean.half())
    check_attention("unlike-dims", [dataclasses.replace(part, formats=formats)])


@pytest.mark.parametrize("query_scale", [1e-6, 3e4])
def test_queries_of_any_size_equal_pytorch(query_scale):
    part, case = make_part("least"), CASES["least"]
    # Large scores choose one key a query, and of two that are alike to bfloat16 rounding does: no such queries
    keys = decode_rows(part.keys, part.formats[0], part.positions)
    queries = torch.cat([make_query(case).to(DEVICE) for _ in range(3)], dim=2).unflatten(1, (case.num_heads, -1))
    largest, next_largest = (queries @ keys[:, :, None].mT).topk(2, dim=-1).values.unbind(dim=-1)
    order = ((largest - next_largest) / largest).argsort(dim=-1, descending=True)
    queries = queries.gather(3, order[..., :3, None].expand(*order.shape[:-1], 3, queries.shape[-1])).flatten(1, 2)
    check_attention("least", [part], torch.bfloat16, query_scale * queries)


@pytest.mark.parametrize(
    ("case", "options", "dtype"),
    [
        *(("least", {"form": form, "layout": layout}, torch.float32) for form in FORMS for layout in LAYOUTS),
        *(("least", {"start": start}, torch.float32) for start in (200, 70_001)),
        # Means much larger than deviations
        ("unlike-dims", {"offset": 10.0}, torch.bfloat16),
        # Capacity behind the rows in use
        ("unlike-dims", {"length": 43}, torch.float32),
    ],
    ids=str,
)
def test_attention_to_other_keys_equals_pytorch(case, options, dtype):
    check_attention(case, [make_part(case, **options)], dtype)


def exact_parts(*lengths, masks=(None,) * 3):
    """Exact tokens of capacity for nine: the first tokens, the buffer, and an update that has not been coded."""
    states = (torch.randn(2, 2, 1, 9, 32, device=DEVICE) for _ in lengths)
    return [DensePart(*each, length, mask) for each, length, mask in zip(states, lengths, masks, strict=False)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_boolean", [True, False], ids=["boolean", "added"])
def test_padding_masks_and_exact_parts_equal_pytorch(is_boolean, form):
    length = 70 if form == "tables" else 43
    part = make_part("widest", form, length, padding=[0, 40], start=300)
    mask = (torch.arange(length) >= torch.tensor([0, 36])[:, None])[:, None, None] & (
        torch.rand(2, 2, 4, length) > 0.2
    )
    # A row that may attend to nothing coded
    mask[1, 0, 2] = False
    if not is_boolean:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    first, *last = exact_parts(7, 9, 3)
    check_attention("widest", [first, dataclasses.replace(part, mask=mask.to(DEVICE)), *last])


def test_masks_of_all_exact_parts_are_applied():
    masks = [torch.rand(2, 1, 4, length, device=DEVICE) > 0.5 for length in (7, 9, 3)]
    first, *last = exact_parts(7, 9, 3, masks=masks)
    check_attention("widest", [first, make_part("widest"), *last])


def test_several_coded_parts_are_merged():
    part = make_part("least")
    second = RowPart(part.keys[:, :, 20:], part.values[:, :, 20:], part.formats, part.positions.after(20), 43, None)
    check_attention("least", [part, second, part])


def test_splits_are_merged(monkeypatch):
    monkeypatch.setattr("kvcache_plugins.triton_kernels.transform_coding.attend._MIN_TOKENS_PER_SPLIT", 64)
    check_attention("splits", [make_part("splits")])


# Three splits of older rows and two of recent ones, and one of 64 rows and two of up to 128
@pytest.mark.parametrize(("num_older", "num_sms"), [(130, 16), (60, 1)])
def test_a_kept_step_merges_its_splits_each_time(num_older, num_sms, monkeypatch):
    """A head's last program merges what all have stored, and prepares the next launch."""
    monkeypatch.setattr("kvcache_plugins.triton_kernels.transform_coding.attend._MIN_TOKENS_PER_SPLIT", 64)
    monkeypatch.setattr("kvcache_plugins.triton_kernels.transform_coding.step.device_num_sms", lambda _: num_sms)
    part = make_part("splits")
    older = dataclasses.replace(part, length=num_older)
    keys, values = part.keys[:, :, num_older:], part.values[:, :, num_older:]
    recent = RowPart(keys, values, part.formats, part.positions.after(num_older), 200 - num_older, None)
    shape = 1, 1, 5, 16
    exact = DensePart(torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE), 5, None)
    parts = [older, recent, exact]
    first = make_query(ALL["splits"]).to(DEVICE)
    kept = keep_attention(first, parts, 1, None)
    for query in (first, first.flip(3), first.neg()):
        expected = exact_attention(query, parts, 1)
        assert (kept(query).double() - expected).norm() < TOLERANCE[torch.float32] * expected.norm()


@pytest.mark.parametrize("form", FORMS)
def test_lengths_are_read_from_the_device(form):
    part, query = make_part("widest", form, padding=[0, 40], start=300), make_query(CASES["widest"]).to(DEVICE)
    cut = dataclasses.replace(part, length=43)
    read = dataclasses.replace(part, num_tokens=torch.tensor([43], device=DEVICE))
    exact = exact_parts(9)
    output, expected = (attend(query, [each, *exact], 1, None, "triton") for each in (read, cut))
    torch.testing.assert_close(output, expected)


def make_states(case, form="tables", dtype=torch.float32, *, offset=1.0, **options):
    """Keys and values of tokens of unlike size, laid out as a model lays them out, and their codec."""
    keys, values, codec, positions = row_states(ALL[case], form, offset=offset, constant=False, **options)
    values = values * torch.randn(*values.shape[:3], 1).exp()
    # Heads of a token one behind the other, and a token that is left out before them
    keys, values = (
        torch.cat([states[:, :, :1], states], dim=2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, 1:].to(DEVICE)
        for states in (keys.to(dtype), values.to(dtype))
    )
    if form == "basis":
        # A token with one channel far larger than all others
        for states in (keys, values):
            states[:, :, ALL[case].length // 2, 5] *= 100
    return keys, values, on_device(codec), positions


def encode(keys, values, codec, positions):
    """Rows of both sides by the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
        return codec.encode(keys, values, positions)


def check_coding(keys, values, codec, positions):
    """Compares rows and what they decode to."""
    rows = encode(keys, values, codec, positions)
    with plain_pytorch():
        expected = codec.encode(keys.float(), values.float(), positions)
        for number, (own, other) in enumerate(zip(rows, expected, strict=True)):
            assert own.dtype == torch.uint8 and own.shape == other.shape
            num_different = int((own != other).any(dim=-1).sum())
            assert num_different <= MOST_DIFFERENT * own[..., 0].numel() + (num_different == 1), number
            states = (values if number else keys).float()
            error, known = (
                (codec.decode_values(each) if number else codec.decode_keys(each, positions)) - states
                for each in (own, other)
            )
            torch.testing.assert_close(error.norm(), known.norm(), rtol=SAME_ERROR, atol=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case", [*CASES, *CODING, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CODING)]
)
def test_rows_equal_pytorch(case, form):
    check_coding(*make_states(case, form))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ["smollm2", "unlike-dims", "d256"])
@pytest.mark.parametrize("form", FORMS)
def test_coding_in_half_precision_equals_pytorch(form, case, dtype):
    check_coding(*make_states(case, form, dtype))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        *(("least", {"form": form, "layout": layout}) for form in FORMS for layout in LAYOUTS),
        *(("smollm2", {"start": start}) for start in (0, 70_001)),
        *(("widest", {"form": form, "padding": [0, 7], "start": 300}) for form in FORMS),
        # Means much larger than deviations
        ("smollm2", {"offset": 20.0}),
    ],
    ids=str,
)
def test_coding_of_other_keys_equals_pytorch(case, options):
    check_coding(*make_states(case, **options))


def test_constant_channels_and_zero_tokens_are_coded_as_in_pytorch():
    keys, values, codec, positions = make_states("widest")
    codec.formats()[0].deviation[:, :, 3] = 0
    keys[:, :, 7], values[:, :, 7] = 0, 0
    check_coding(keys, values, codec, positions)


@pytest.mark.parametrize("factor", [1e-8, 1e6])
def test_tokens_beyond_the_largest_scale_are_coded_as_in_pytorch(factor):
    keys, values, codec, positions = make_states("widest")
    values[:, :, 5] *= factor
    check_coding(keys, values, codec, positions)


def test_non_finite_numbers_stay_in_their_row():
    keys, values, codec, positions = make_states("widest")
    known = encode(keys, values, codec, positions)
    for states in (keys, values):
        states[0, 0, 7], states[1, 0, 8, 3], states[1, 0, 9, 3] = torch.nan, torch.inf, -torch.inf
    rows = encode(keys, values, codec, positions)
    for own, other in zip(rows, known, strict=True):
        own[0, 0, 7], own[1, 0, 8:10] = other[0, 0, 7], other[1, 0, 8:10]
        assert torch.equal(own, other)


def test_encoding_no_tokens_gives_empty_rows():
    keys, values, codec, positions = make_states("widest")
    rows = encode(keys[:, :, :0], values[:, :, :0], codec, positions)
    assert [each.shape for each in rows] == [(2, 1, 0, size) for size in codec.row_sizes]


def test_no_cell_has_two_bounds():
    book, bounds = codebook_of(True, torch.device("cpu")), level_tables(torch.device("cpu")).bounds
    assert torch.equal(book.cell_bounds.isfinite().sum(dim=1), bounds.isfinite().sum(dim=1))


@pytest.mark.parametrize("width", range(9))
def test_codes_at_the_bounds_equal_pytorch(width):
    book, bounds = codebook_of(True, torch.device("cpu")), level_tables(torch.device("cpu")).bounds[width]
    ends = torch.arange(-300, 301) / 64
    near = torch.cat([bounds[bounds.isfinite()], ends])
    numbers = torch.cat([near, near.nextafter(near + 1), near.nextafter(near - 1), torch.tensor([torch.inf, 100.0])])
    # The arithmetic of the kernel
    cells = ((numbers.clamp(-4.5, 4.5) + 4.5) * 64).int()
    codes = book.cell_codes[width, cells].int() + (numbers > book.cell_bounds[width, cells]).int()
    assert torch.equal(codes.long(), torch.searchsorted(bounds, numbers))
