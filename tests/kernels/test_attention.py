"""Attention over every form of storage by every engine, against float64 over what the codecs decode to."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    Groups,
    any_part,
    dense_part,
    exact_attention,
    group_part,
    make_mask,
    make_query,
    rounding_of,
    row_part,
)

from kvcache_plugins.formats.groups import index_dtype
from kvcache_plugins.formats.parts import DensePart, GroupPart
from kvcache_plugins.kernels.attention import attend, can_attend
from kvcache_plugins.kernels.compiled import PreparedCall
from kvcache_plugins.kernels.engine import choose_flash
from kvcache_plugins.kernels.masks import combine_masks, leading_padding, mask_columns, slice_mask
from kvcache_plugins.kernels.online_attention import OnlineAttention
from kvcache_plugins.layers.exact_tokens import ExactTail


TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 8e-3}
HALVES = [torch.float16, torch.bfloat16]
CORRECTIONS = {
    "codes": {},
    "rotated": {"is_rotated": True},
    "low-rank": {"rank": 4},
    "rank-and-outliers": {"rank": 3, "sparsity": 0.1},
    "all": {"rank": 1, "is_rotated": True, "sparsity": 0.03},
}


def check(case, parts, engine, dtype=torch.float32, factor=1.0):
    query = make_query(case, dtype)
    expected = exact_attention(query, parts, case.num_heads)
    output = attend(query, parts, case.num_heads, kernel=engine)
    assert output.dtype == dtype and output.shape == expected.shape
    tolerance = max(factor * TOLERANCE[dtype], *(rounding_of(part, engine) for part in parts))
    assert (output.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("form", ["tables", "basis"])
def test_attention_over_rows_equals_float64(row_case, form, engine):
    check(row_case, [row_part(row_case, form), dense_part(row_case, 3)], engine, factor=2)


@pytest.mark.parametrize("corrections", CORRECTIONS.values(), ids=CORRECTIONS)
def test_attention_over_groups_equals_float64(group_case, corrections, engine):
    # The average of many values is close to nothing
    factor = 4 if group_case.length > 1000 else 1
    check(group_case, [group_part(group_case, **corrections), dense_part(group_case, 3)], engine, factor=factor)


@pytest.mark.cases("smollm2", "odd-dims", "large")
@pytest.mark.parametrize("length", [1, 8, 130])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_over_exact_tokens_equals_float64(row_case, length, dtype, engine):
    check(row_case, [dense_part(row_case, length, dtype)], engine, dtype)


@pytest.mark.cases("smollm2")
@pytest.mark.parametrize("num_queries", [1, 20])
def test_exact_parts_without_tokens_change_nothing(row_case, num_queries, engine):
    case = row_case._replace(num_queries=num_queries)
    query, part, empty = make_query(case), dense_part(case, 3), dense_part(case, 0)
    parts = [dataclasses.replace(empty, length=0), part]
    outputs = (attend(query, each, case.num_heads, kernel=engine) for each in (parts, [part], parts[::-1]))
    first, expected, last = outputs
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(last, expected)


@pytest.mark.cases("wide")
@pytest.mark.parametrize("layout", ["interleaved", "none"])
@pytest.mark.parametrize("form", ["tables", "basis"])
def test_every_rotary_layout_equals_float64(row_case, form, layout, engine):
    check(row_case, [row_part(row_case, form, layout=layout)], engine)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.cases("wide", "k4v3", "odd-groups")
def test_half_precision_queries_equal_float64(case, dtype, engine):
    check(case, [any_part(case)], engine, dtype)


@pytest.mark.parametrize("kind", ["padding", "each head", "heads alike", "items alike", "added", "fewer columns"])
@pytest.mark.cases("wide", "k4v3", "odd-groups")
def test_masked_attention_equals_float64(case, kind, engine):
    mask = make_mask(kind, case, case.length)
    if isinstance(case, Groups):
        check(case, [any_part(case, mask), dense_part(case, 2)], engine)
        return
    for form in ("tables", "basis"):
        check(case, [dense_part(case, 7), row_part(case, form, padding=[0, 40], mask=mask)], engine)


@pytest.mark.cases("wide", "k4v3")
def test_fully_masked_query_returns_zeros(case, engine):
    mask = torch.zeros(1, 1, 1, case.length, dtype=torch.bool)
    assert not attend(make_query(case), [any_part(case, mask)], case.num_heads, kernel=engine).any()


@pytest.mark.cases("wide", "k4v3")
def test_sequences_are_independent(case, engine):
    part, query = any_part(case), make_query(case)
    output = attend(query, [part], case.num_heads, kernel=engine)
    query[1] = torch.randn(query.shape[1:])
    other = attend(query, [part], case.num_heads, kernel=engine)
    assert torch.equal(output[0], other[0]) and not torch.equal(output[1], other[1])


@pytest.mark.parametrize("form", ["tables", "basis"])
@pytest.mark.cases("wide")
def test_capacity_behind_the_rows_in_use_is_not_read(row_case, form, engine):
    part = dataclasses.replace(row_part(row_case, form), length=77)
    query, cut = make_query(row_case), [side[:, :, :77] for side in (part.keys, part.values)]
    expected = attend(query, [dataclasses.replace(part, keys=cut[0], values=cut[1])], 2, kernel=engine)
    assert torch.equal(attend(query, [part], 2, kernel=engine), expected)


@pytest.mark.cases("long")
def test_threads_that_share_a_sequence_equal_float64(row_case, group_case, num_threads):
    check(row_case, [row_part(row_case)], "compiled", factor=4)
    parts = [group_part(group_case, rank=2, sparsity=0.02, is_rotated=True), dense_part(group_case, 5)]
    check(group_case, parts, "compiled", factor=4)


@pytest.mark.cases("long")
def test_threads_merge_scores_below_float32_exponents(row_case, num_threads):
    """Exponentials of all scores are 0 in float32."""
    query, part = make_query(row_case), dense_part(row_case, row_case.length)
    # No larger than needed: float32 rounds larger scores more, in another way on another machine
    query[..., 0] = 27
    part.keys[..., 0] = -27
    scores = row_case.key_dim**-0.5 * query.unflatten(1, (row_case.num_heads, -1)) @ part.keys.mT[:, :, None]
    assert scores.max().exp() == 0
    output = attend(query, [part], row_case.num_heads, kernel="compiled")
    expected = exact_attention(query, [part], row_case.num_heads)
    torch.testing.assert_close(output.double(), expected, atol=1e-3, rtol=0)


@pytest.mark.cases("wide", "k4v3", "kcvt")
def test_prepared_call_attends_to_later_tokens(case, level):
    part = any_part(case) if isinstance(case, Groups) else row_part(case, padding=[0, 40])
    heads, (keys, values) = case.num_heads, torch.randn(2, 2, case.num_heads, 9, 64)
    tail = ExactTail(keys, values, 9)
    call = PreparedCall(make_query(case), [part, DensePart(keys, values, 1, None)], heads, 0.125)
    assert call.is_lasting
    for length in (2, 3, 9):
        query, newest = make_query(case), torch.randn(2, 2, heads, 1, 64).unbind()
        tail.length, tail.unwritten = length, newest
        output = call.attend(query, 0.125, tail)
        assert tail.unwritten is None and torch.equal(tail.keys[:, :, length - 1 :], newest[0])
        parts = [part, DensePart(*tail.storage, length, None)]
        torch.testing.assert_close(output.double(), exact_attention(query, parts, heads), atol=1e-4, rtol=0)
        # And to the bit what a call made anew does
        assert torch.equal(call.attend(query, 0.125, tail), output)
        assert torch.equal(attend(query, parts, heads, 0.125, "compiled"), output)
    # Others than it was prepared for; what tokens it takes: `tests/gear/test_prepared_parts.py`
    assert call.attend(query, 0.5, tail) is None
    assert call.attend(query.half(), 0.125, tail) is None


@pytest.mark.cases("wide", "k4v3")
def test_copies_are_attended_to_but_not_prepared(case):
    part = any_part(case)
    if isinstance(case, Groups):
        twice = [side.map(lambda each: torch.stack([each, each], dim=-1)[..., 0]) for side in (part.keys, part.values)]
        part = GroupPart(*twice, part.length, None)
    else:
        part = dataclasses.replace(part, keys=part.keys[:, :, :77], length=77)
    check(case, [part], "compiled")
    assert not PreparedCall(make_query(case), [part, dense_part(case, 1)], 2, 0.125).is_lasting


class TestForged:
    """Forged numbers in memory, which must not lead out of it."""

    @pytest.mark.parametrize("widths", [8, 9, 255])
    @pytest.mark.cases("wide")
    def test_forged_row_formats_stay_in_bounds(self, row_case, level, widths):
        part = row_part(row_case)
        keys, values = (
            dataclasses.replace(table, widths=torch.full_like(table.widths, widths)) for table in part.formats
        )
        keys = dataclasses.replace(keys, order=torch.full_like(keys.order, 255))
        forged = dataclasses.replace(part, formats=(keys, values))
        assert attend(make_query(row_case), [forged], 2, kernel="compiled").isfinite().all()

    @pytest.mark.parametrize("offsets", [[2**31 - 1, -(2**31)], [-(2**31), 2**31 - 1], None])
    @pytest.mark.cases("k4v3")
    def test_forged_outliers_stay_in_bounds(self, group_case, level, offsets):
        part, forged = group_part(group_case, sparsity=0.05), {}
        for name in ("keys", "values"):
            side = getattr(part, name)
            random = torch.randint(-(2**15), 2**15, side.outlier_indices.shape, dtype=torch.int16)
            places = torch.randint(-(2**31), 2**31, side.outlier_offsets.shape, dtype=torch.int32)
            if offsets is not None:
                places.view(-1).copy_(torch.tensor(offsets).repeat(places.numel())[: places.numel()])
            forged[name] = dataclasses.replace(side, outlier_indices=random, outlier_offsets=places)
        parts = [GroupPart(**forged, length=part.length, mask=None)]
        assert attend(make_query(group_case), parts, 2, kernel="compiled").isfinite().all()


class TestRefused:
    @pytest.mark.cases("wide")
    def test_rows_and_formats_of_wrong_sizes_are_refused(self, row_case):
        part, query = row_part(row_case), make_query(row_case)
        table, values = part.formats
        few, few_values = (dataclasses.replace(each, widths=each.widths[:, :, :1]) for each in (table, values))
        no_mean = dataclasses.replace(table, mean=table.mean[:, :1])
        wrong = [
            {"length": part.length + 1},
            {"keys": part.keys[:1]},
            {"keys": part.keys.short()},
            *({"formats": each} for each in ((few, values), (table, few_values), (no_mean, values))),
        ]
        for changes in wrong:
            with pytest.raises(ValueError):
                attend(query, [dataclasses.replace(part, **changes)], 2, kernel="compiled")
        with pytest.raises(ValueError):
            attend(torch.randn(2, 6, 4, 32), [part], 2, kernel="compiled")

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("codes", lambda tensor: tensor[..., :-1].contiguous()),
            ("codes", lambda tensor: tensor.to(torch.int8)),
            ("scale", lambda tensor: tensor.float()),
            ("scale", lambda tensor: tensor[:, :1].repeat(1, 3, 1, 1, 1)),
            ("zero", lambda tensor: tensor[:, :, :, :1].contiguous()),
            ("low_rank_a", lambda tensor: tensor.repeat(1, 1, 1, 2, 1)),
            ("low_rank_b", lambda tensor: tensor[:, :, :, :-1].contiguous()),
            ("outlier_values", lambda tensor: tensor[..., :-1].contiguous()),
            ("outlier_offsets", lambda tensor: tensor.long()),
            ("outlier_offsets", lambda tensor: tensor[..., :-1].contiguous()),
        ],
    )
    @pytest.mark.cases("k4v3")
    def test_group_tensors_of_wrong_shapes_are_refused(self, group_case, name, change):
        part = group_part(group_case, rank=2, sparsity=0.05)
        for side in ("keys", "values"):
            states = getattr(part, side)
            other = dataclasses.replace(states, **{name: change(getattr(states, name))})
            wrong = dataclasses.replace(part, **{side: other})
            with pytest.raises(ValueError, match="scale" if name == "scale" else "of shape|has to be"):
                attend(make_query(group_case), [wrong], 2, kernel="compiled")

    @pytest.mark.cases("k4v3")
    def test_groups_of_wrong_lengths_and_kinds_are_refused(self, group_case):
        part, query = group_part(group_case, is_rotated=True), make_query(group_case)
        with pytest.raises(ValueError, match="193 tokens of 1 chunks of 192"):
            PreparedCall(query, [dataclasses.replace(part, length=193)], 2, 0.1)
        with pytest.raises(ValueError, match="compressed keys and values have to be"):
            PreparedCall(query[:1], [part], 2, 0.1)
        for wrong in (dataclasses.replace(part, values=part.keys), dataclasses.replace(part, keys=part.values)):
            with pytest.raises(ValueError, match="groups of a token, and keys that are not rotated"):
                PreparedCall(query, [wrong], 2, 0.1)


@pytest.mark.cases("widest")
def test_sizes_at_the_limits_of_c_equal_float64(group_case, level):
    """Wide indices of outliers, ranks beyond a block of factors, and heads too large for C, which PyTorch takes."""
    part = group_part(group_case, sparsity=0.02)
    assert part.keys.outlier_indices.dtype == index_dtype(640) == torch.int32
    check(group_case, [part], "compiled")
    check(group_case, [group_part(group_case, rank=64)], "compiled", factor=4)
    huge = group_case._replace(keys=(648, 4, "channel", 10), values=(648, 4, "token", None))
    check(huge, [group_part(huge)], "compiled")
    assert not can_attend(make_query(huge), [group_part(huge), dense_part(huge, 1)])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_results_are_rounded_to_the_nearest(level, dtype):
    # Means of two neighbours are ties, of all magnitudes that there are
    steps = torch.arange(*((0, 0x7BFF) if dtype == torch.float16 else (0x80, 0x7F00)), 7, dtype=torch.int16)
    low, high = (each.view(dtype).view(1, 1, 1, -1) for each in (steps, steps + 1))
    values = torch.cat([low, high], dim=2)[..., : 640 * (len(steps) // 640)]
    values = torch.cat(values.split(640, dim=3), dim=1)
    zeros = values.new_zeros(1, values.shape[1], 2, 8)
    output = attend(zeros[:, :, :1], [DensePart(zeros, values, 2, None)], values.shape[1], 1.0, "compiled")
    expected = (values[:, :, :1].float() * 0.5 + values[:, :, 1:].float() * 0.5).to(dtype)
    assert torch.equal(output, expected)


def test_answers_have_the_dtype_of_queries_that_c_does_not_know():
    keys = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    part = DensePart(keys.float(), keys.float(), 5, None)
    output = attend(keys[:, :, :1], [part], 2, 1.0, "compiled")
    assert output.dtype == torch.float64
    expected = F.scaled_dot_product_attention(keys[:, :, :1], keys, keys, scale=1.0)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


class TestOnlineAttention:
    """The reference, by PyTorch's flash attention for prompts and by products for few tokens."""

    @pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
    @pytest.mark.parametrize("num_queries", [1, 16, 17])
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("kind", ["none", "bool", "additive", "per-head", "causal", "2d"])
    def test_tiles_equal_attention_over_the_whole(self, heads, num_queries, dtype, kind):
        query = torch.randn(2, heads[0], num_queries, 24).to(dtype)
        keys, values = (torch.randn(2, heads[1], 200, 24).to(dtype) for _ in range(2))
        allowed = torch.rand(2, heads[0] if kind == "per-head" else 1, num_queries, 200) > 0.3
        # Some queries see nothing of the first tile, of a later one, and of all
        allowed[0, 0, 0, :64] = False
        allowed[1, :, -1, 64:129] = False
        mask = {
            "none": None,
            "additive": torch.where(allowed, 0.5, torch.finfo(dtype).min).to(dtype),
            "causal": torch.ones(num_queries, 200, dtype=torch.bool).tril(200 - num_queries),
            "2d": allowed[0, 0],
        }.get(kind, allowed)
        options = {"attn_mask": mask.float() if kind == "additive" else mask, "scale": 0.3, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(query.float(), keys.float(), values.float(), **options)
        attention = OnlineAttention(query, heads[1], 0.3)
        for start, stop in ((0, 1), (1, 64), (64, 129), (129, 200)):
            attention.add_tile(keys[:, :, start:stop], values[:, :, start:stop], slice_mask(mask, start, stop))
        output = attention.result()
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)

    @pytest.mark.parametrize("num_queries", [1, 17])
    @pytest.mark.parametrize("is_masked", [False, True], ids=["", "masked"])
    def test_strided_channels_equal_contiguous_ones(self, num_queries, is_masked):
        """Keys and values of a convolution are `[B, H, D, T]`."""
        query = torch.randn(2, 6, num_queries, 24)
        keys, values = torch.randn(2, 2, 24, 50).mT, torch.randn(2, 2, 24, 50).mT
        mask = torch.randn(2, 6, num_queries, 50) if is_masked else None
        expected = F.scaled_dot_product_attention(query, keys.contiguous(), values.contiguous(), mask, enable_gqa=True)
        output = attend(query, [DensePart(keys, values, 50, mask)], 2)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("heads_of_mask", [None, 1, 6])
    @pytest.mark.parametrize("rows_of_mask", [1, 19])
    def test_queries_are_split_to_bound_scores(self, monkeypatch, heads_of_mask, rows_of_mask):
        query, keys, values = torch.randn(2, 6, 19, 24), torch.randn(2, 2, 50, 24), torch.randn(2, 2, 50, 24)
        mask = None if heads_of_mask is None else torch.rand(2, heads_of_mask, rows_of_mask, 50) > 0.3
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
        expected = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        for most in (1, 12 * 50 * 7 + 1):
            monkeypatch.setattr("kvcache_plugins.kernels.online_attention._MOST_SCORES", most)
            output = attend(query, [DensePart(keys, values, 50, mask)], 2)
            torch.testing.assert_close(output, expected)

    def test_only_prompts_of_equal_head_dims_use_flash_attention(self, monkeypatch):
        assert choose_flash(torch.randn(1, 2, 17, 8), 8)
        assert not choose_flash(torch.randn(1, 2, 16, 8), 8)
        assert not choose_flash(torch.randn(1, 2, 17, 8), 12)
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
        assert not choose_flash(torch.randn(1, 2, 17, 8), 8)

    def test_gradients_reach_queries(self):
        query = torch.randn(1, 2, 3, 8, requires_grad=True)
        states = torch.randn(2, 1, 2, 9, 8)
        tiles = [DensePart(*states[..., first : first + 3, :], 3, None) for first in (0, 3, 6)]
        attend(query, tiles, 2).sum().backward()
        own = query.grad.clone()
        query.grad = None
        F.scaled_dot_product_attention(query, *states).sum().backward()
        torch.testing.assert_close(own, query.grad)


class TestMasks:
    @pytest.mark.parametrize("additive", [False, True])
    def test_leading_padding_is_read_from_masks(self, additive):
        padding = torch.tensor([0, 3, 6])
        allowed = (torch.arange(8) >= padding[:, None])[:, None, None] & torch.ones(8, 8, dtype=torch.bool).tril()
        mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min) if additive else allowed
        assert leading_padding(mask, 0, None, 3).tolist() == padding.tolist()
        # In two updates; the first holds nothing but padding of the last sequence
        known = leading_padding(mask[:, :, :4, :4], 0, None, 3)
        assert known.tolist() == [0, 3, 4]
        assert leading_padding(mask[:, :, 4:], 4, known, 3).tolist() == padding.tolist()

    def test_a_sliding_window_is_not_padding(self):
        distance = torch.arange(8)[:, None] - torch.arange(8)
        assert leading_padding(((distance >= 0) & (distance < 3))[None, None], 0, None, 1) is None

    def test_mask_columns_are_gathered_by_position(self):
        mask, positions = torch.rand(2, 1, 3, 10) > 0.5, torch.tensor([[0, 1], [4, 12]])
        gathered = mask_columns(mask, positions, 2, 10)
        assert torch.equal(gathered[1], mask[1][..., [4, 9]])
        allowed = torch.tensor([[True, False], [True, True]])
        assert not combine_masks(gathered, allowed)[0, :, :, 1].any()
        assert combine_masks(torch.zeros(2, 1, 3, 2), allowed)[0, 0, 0].tolist() == [0, -torch.inf]
