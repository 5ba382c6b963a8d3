"""Attention to selected tokens by every engine, against float64: scores, the largest, copies and attention."""

import dataclasses
from functools import partial
from typing import NamedTuple

import pytest
import torch
from kernel_cases import Scored, random_codes, rounding_of, row_part

from kvcache_plugins.formats.parts import SelectableRows, SinkStates
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.ops import decode_tiles
from kvcache_plugins.kernels.selective_attention import (
    Selection,
    attend_fetched,
    attend_selected,
    gather_rows,
    topk,
)
from kvcache_plugins.kernels.token_scores import KeyCodes, PreparedRows, score_codes, score_rows


TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# The compiled kernels round queries to 16 bits
SCORE_TOLERANCE = 1e-4
FORGED = (-(2**63), -1, 64, 2**40)


@pytest.fixture(autouse=True)
def _as_engine_says(request, monkeypatch):
    """Functions that choose what computes follow the engine."""
    if "engine" in request.fixturenames:
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.getfixturevalue("engine"))


def assert_near(output, expected, tolerance=SCORE_TOLERANCE):
    assert output.shape == expected.shape
    error = (output.double() - expected).square().mean() / expected.square().mean().clamp(min=1e-30)
    assert error.sqrt() < tolerance


SCORED = {
    "a few tokens": Scored(1, 1, 1, 64, 4, 5),
    "groups of queries": Scored(2, 3, 3, 64, 4, 200),
    "more than a task": Scored(1, 2, 4, 64, 2, 4480),
    "8 bits": Scored(2, 2, 2, 80, 8, 130),
    "a head dim that vectors do not divide, nine queries": Scored(1, 1, 9, 84, 2, 150),
    "fewer bytes than are read at once": Scored(1, 3, 1, 20, 4, 61),
    "bytes that hold fewer channels than they could": Scored(2, 1, 5, 50, 4, 90),
    "8 bits of many channels": Scored(1, 1, 1, 300, 8, 96),
}


@pytest.mark.parametrize("scored", SCORED.values(), ids=SCORED)
def test_scores_of_codes_equal_float64(scored, engine):
    query, codes, scale, dense = random_codes(scored)
    spread = torch.rand(*query.shape[:2], 1, query.shape[3]) + 0.5
    scores = score_codes(query, KeyCodes(codes, scale, spread, dense.shape[2], scored.nbits))
    assert_near(scores, (query * spread).double() @ dense.transpose(2, 3))


@pytest.mark.parametrize("size", [0.0, 1e-35, 1e20])
def test_scores_follow_queries_of_any_size(size, engine):
    query, codes, scale, dense = random_codes(SCORED["more than a task"])
    keys = KeyCodes(codes, scale, torch.ones(1, 2, 1, 64), dense.shape[2], 2)
    scores = score_codes(torch.full_like(query, size), keys)
    expected = torch.full_like(query, size).double() @ dense.transpose(2, 3)
    assert torch.allclose(scores.double(), expected, atol=1e-4 * size + 1e-30)


def test_scores_depend_on_their_sequence_only(num_threads):
    query, codes, scale, dense = random_codes(SCORED["8 bits"])
    spread, one = torch.rand(2, 2, 1, 80), slice(1, 2)
    together = score_codes(query, KeyCodes(codes, scale, spread, dense.shape[2], 8))
    alone = score_codes(query[one], KeyCodes(codes[one], scale[one], spread[one], dense.shape[2], 8))
    assert torch.equal(together[one], alone)


class TestTopK:
    @pytest.mark.parametrize("length", [1, 7, 2049])
    def test_topk_values_are_sorted(self, length, engine, num_threads):
        numbers = torch.randn(2, 3, length) * 10.0 ** torch.randint(-20, 20, (2, 3, length))
        numbers[..., length // 2] = -torch.inf
        values, indices = topk(numbers, length)
        assert torch.equal(values, numbers.sort(dim=2, descending=True).values)
        assert torch.equal(numbers.gather(2, indices), values)

    def test_topk_respects_the_least_value(self, engine):
        numbers, least = torch.randn(2, 3, 200), torch.tensor([-5.0, 1.0])[:, None, None]
        values, indices = topk(numbers, 60, least)
        expected = numbers.topk(60, dim=2)
        counts = (expected.values >= least).sum(dim=2, keepdim=True)
        assert int(counts.min()) < 60 == int(counts.max())
        is_wanted = torch.arange(60) < counts
        assert torch.equal((values >= least).sum(dim=2, keepdim=True), counts)
        assert torch.equal(values[is_wanted], expected.values[is_wanted])
        assert torch.equal(indices[is_wanted], expected.indices[is_wanted])

    def test_topk_is_stable_and_skips_nan(self, level):
        numbers = torch.randint(-3, 3, (4, 500)).float()
        expected = numbers.sort(dim=1, descending=True, stable=True)
        assert torch.equal(topk(numbers, 300)[1], expected.indices[:, :300])
        values, indices = topk(torch.tensor([[torch.nan, 1.0, 2.0]]), 3)
        assert (values.tolist(), indices.tolist()) == ([[2.0, 1.0, -torch.inf]], [[2, 1, 0]])

    def test_scratch_limits_the_threads(self, level, monkeypatch, request):
        """Another thread of the program may ask PyTorch for more of them between two lines."""
        request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
        numbers = torch.randn(40, 3000)
        torch.set_num_threads(1)
        expected = topk(numbers, 3000)
        torch.set_num_threads(4)
        monkeypatch.setattr("kvcache_plugins.kernels.selective_attention.num_threads", lambda: 1)
        for found, known in zip(topk(numbers, 3000), expected, strict=True):
            assert torch.equal(found, known)


class Chosen(NamedTuple):
    """Sizes of selected tokens and a tail."""

    batch_size: int = 2
    num_heads: int = 2
    groups: int = 3
    key_dim: int = 64
    value_dim: int = 64
    num_slots: int = 90
    most: int = 40
    tail: int = 7
    page_tokens: int = 32


CHOSEN = {
    "groups of three": Chosen(),
    "one of each": Chosen(batch_size=1, num_heads=1, groups=1, num_slots=1, most=1, tail=1),
    "as many heads as queries, small": Chosen(groups=1, key_dim=20, value_dim=20, most=63),
    "one head for nine queries": Chosen(num_heads=1, groups=9, key_dim=40, value_dim=40, tail=65),
    "different keys and values": Chosen(groups=4, key_dim=80, value_dim=24, num_slots=200, most=130),
    "a head as small as a vector": Chosen(key_dim=8, value_dim=9, page_tokens=1),
    "smaller than any vector": Chosen(key_dim=3, value_dim=1),
    "large": Chosen(batch_size=1, key_dim=300, value_dim=256, most=70),
    "long": Chosen(batch_size=1, num_slots=2500, most=2049, page_tokens=1024),
}


def random_step(case, dtype=torch.float32, counts=None):
    """Make arguments of `attend`, with NaN in rows that are not selected and in spare capacity of the tail."""
    slots = torch.rand(case.batch_size, case.num_heads, case.num_slots).topk(case.most, dim=2).indices
    count = torch.randint(0, case.most + 1, slots.shape[:2])
    count[0, 0] = case.most
    count[-1, -1] = min(count[-1, -1], 0 if case.batch_size > 1 else case.most)
    count = count if counts is None else torch.tensor(counts)
    slots = slots.masked_fill(torch.arange(case.most) >= count[..., None], 0)
    row_dim, num_pages = case.key_dim + case.value_dim, -(-case.num_slots // case.page_tokens)
    rows = torch.randn(case.batch_size, case.num_heads, num_pages * case.page_tokens, row_dim)
    is_chosen = torch.zeros(rows.shape[:3], dtype=torch.bool).scatter_(2, slots, True)
    # In plain PyTorch filling is read, if only to count nothing
    is_chosen[:, :, 0] = True
    rows = rows.masked_fill(~is_chosen[..., None], torch.nan).to(dtype)
    tail = torch.randn(case.batch_size, case.num_heads, case.tail + 3, row_dim).to(dtype)
    tail[:, :, case.tail :] = torch.nan
    keys, values = (part.contiguous() for part in tail.split([case.key_dim, case.value_dim], dim=3))
    query = torch.randn(case.batch_size, case.num_heads, case.groups, case.key_dim).to(dtype)
    pages = [page.contiguous() for page in rows.split(case.page_tokens, dim=2)]
    return [query, pages, slots, count, keys[:, :, : case.tail], values[:, :, : case.tail], 0.3]


def attend(query, pages, slots, count, keys, values, scale, engine, mask=None, positions=None, tail_start=0):
    """Attend to rows where they are stored, or gathered."""
    mask = None if mask is None else mask[:, None, None]
    call = AttentionCall(query, mask, scale=scale)
    if engine == "compiled":
        return attend_selected(call, pages, Selection(slots, count), (keys, values), tail_start, positions)
    keys_and_values = gather_rows(pages, slots).split([query.shape[3], values.shape[3]], dim=3)
    positions = slots if positions is None else positions
    return attend_fetched(call, keys_and_values, count, (keys, values), tail_start, positions)


def reference(query, keys, values, slots, count, tail, scale, mask=None, positions=None, tail_start=0):
    """Head by head in float64, over keys and values in all slots."""
    output = query.new_zeros(*query.shape[:3], values.shape[3], dtype=torch.double)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            own = slots[b, h, : count[b, h]]
            all_keys, all_values = (
                torch.cat([states[b, h, own].double(), newest[b, h].double()])
                for states, newest in zip((keys, values), tail, strict=True)
            )
            scores = query[b, h].double() @ all_keys.T * scale
            if mask is not None:
                columns = own if positions is None else positions[b, h, : count[b, h]]
                line = torch.cat([mask[b, columns], mask[b, tail_start : tail_start + tail[0].shape[2]]])
                line = torch.zeros_like(scores[0]).masked_fill(~line, -torch.inf) if line.dtype == torch.bool else line
                scores = scores + line
            output[b, h] = scores.softmax(dim=1).nan_to_num() @ all_values
    return output


def check(arguments, engine, **masking):
    query, pages, slots, count, *tail, scale = arguments
    output = attend(*arguments, engine, **masking)
    assert output.dtype == query.dtype
    rows = torch.cat(pages, dim=2).split([query.shape[3], tail[1].shape[3]], dim=3)
    assert_near(output, reference(query, *rows, slots, count, tail, scale, **masking), TOLERANCE[query.dtype])


class TestExactRows:
    @pytest.mark.parametrize("name", CHOSEN)
    def test_selected_attention_equals_float64(self, name, engine):
        check(random_step(CHOSEN[name]), engine)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sizes", [{}, {"key_dim": 20, "value_dim": 28}], ids=str)
    def test_selected_attention_in_half_precision_equals_float64(self, dtype, sizes, engine):
        check(random_step(Chosen(**sizes), dtype), engine)

    @pytest.mark.parametrize("counts", [[[0, 40], [1, 0]], [[0, 0], [0, 0]]], ids=str)
    def test_heads_that_fetch_nothing_equal_float64(self, counts, engine):
        check(random_step(Chosen(), counts=counts), engine)

    @pytest.mark.parametrize("kind", ["padding", "expanded", "added", "lowest"])
    def test_masked_attention_equals_float64(self, kind, engine):
        columns = torch.arange(97)
        added = torch.randn(2, 97)
        mask = {
            "padding": columns >= torch.tensor([0, 60])[:, None],
            "expanded": (columns >= 70)[None].expand(2, -1),
            "added": added.masked_fill(columns < torch.tensor([0, 50])[:, None], -torch.inf),
            "lowest": added.masked_fill(columns < torch.tensor([0, 50])[:, None], torch.finfo(torch.float32).min),
        }[kind]
        check(random_step(Chosen()), engine, mask=mask, tail_start=90)

    @pytest.mark.parametrize("is_boolean", [True, False])
    def test_masks_follow_positions_and_not_slots(self, is_boolean, engine):
        arguments = random_step(CHOSEN["different keys and values"])
        mask = torch.randn(2, 300) if not is_boolean else torch.rand(2, 300) > 0.5
        positions = torch.randint(0, 250, arguments[2].shape)
        # Slots behind the counts have no token
        positions[torch.arange(130).expand_as(positions) >= arguments[3][..., None]] = -1
        check(arguments, engine, mask=mask, positions=positions, tail_start=250)

    def test_fully_masked_sequence_returns_zeros(self, engine):
        mask = torch.ones(2, 97, dtype=torch.bool)
        mask[1] = False
        output = attend(*random_step(Chosen()), engine, mask=mask, tail_start=90)
        assert output[0].isfinite().all() and (output[0] != 0).any() and (output[1] == 0).all()

    def test_slots_behind_the_count_are_ignored(self, engine):
        outputs, arguments = [], random_step(Chosen(), counts=[[0, 40], [1, 2]])
        filling = torch.arange(arguments[2].shape[2]) >= arguments[3][..., None]
        for place in (0, 5):
            arguments[2] = arguments[2].masked_fill(filling, place)
            outputs.append(attend(*arguments, engine))
            arguments[1] = [page.nan_to_num(torch.inf) for page in arguments[1]]
        assert torch.equal(*outputs)

    def test_attention_ignores_other_sequences_and_strides(self, engine, num_threads):
        query, pages, slots, count, keys, values, scale = arguments = random_step(CHOSEN["different keys and values"])
        together = attend(*arguments, engine)
        for item in range(2):
            one = slice(item, item + 1)
            alone = query[one], [page[one] for page in pages], slots[one], count[one], keys[one], values[one], scale
            assert torch.equal(together[one], attend(*alone, engine))
        arguments[1] = [page.transpose(1, 2).contiguous().transpose(1, 2) for page in pages]
        arguments[4:6] = [states.transpose(2, 3).contiguous().transpose(2, 3) for states in (keys, values)]
        torch.testing.assert_close(attend(*arguments, engine), together)

    @pytest.mark.parametrize("forged", FORGED)
    def test_forged_slots_positions_and_counts_stay_in_bounds(self, forged, level):
        pages = [torch.ones(1, 1, 32, 16) for _ in range(2)]
        slots, tail = torch.full((1, 1, 5), forged), torch.ones(1, 1, 3, 8)
        query, mask = torch.randn(1, 1, 2, 8), torch.ones(1, 1, 1, 9, dtype=torch.bool)
        for count in (5, forged):
            of_heads = torch.full((1, 1), count)
            call = AttentionCall(query, mask, scale=0.3)
            output = attend_selected(call, pages, Selection(slots, of_heads), (tail, tail), 6, slots)
            assert torch.allclose(output, torch.ones(1, 1, 2, 8))
        assert (gather_rows(pages, slots) == 1).all()

    def test_masks_without_the_columns_of_the_tail_are_refused(self):
        with pytest.raises(ValueError, match="`mask` has to have at least 97 columns"):
            attend(*random_step(Chosen()), "compiled", torch.ones(2, 96), tail_start=90)

    @pytest.mark.parametrize(
        ("num_pages", "page_tokens", "row_dim", "dtype"),
        [(1, 64, 128, torch.float32), (3, 64, 7, torch.uint8), (30, 16, 33, torch.bfloat16)],
    )
    def test_rows_of_all_pages_are_gathered(self, engine, num_threads, num_pages, page_tokens, row_dim, dtype):
        pages = [torch.randint(0, 100, (2, 3, page_tokens, row_dim)).to(dtype) for _ in range(num_pages)]
        slots = torch.randint(0, num_pages * page_tokens, (2, 3, 41))
        expected = torch.cat(pages, dim=2).gather(2, slots[..., None].expand(-1, -1, -1, row_dim))
        found, none = gather_rows(pages, slots[:, :, :40]), gather_rows(pages, slots[:, :, :0])
        assert torch.equal(found, expected[:, :, :40]) and none.shape == (2, 3, 0, row_dim)


def tokens_of(part, length, *exact):
    """Tokens whose values stand in three pages."""
    pages = [page.contiguous() for page in part.values.split(-(-length // 3), dim=2)][:3]
    pages[-1] = torch.nn.functional.pad(pages[-1], (0, 0, 0, pages[0].shape[2] - pages[-1].shape[2]))
    none = [part.keys.new_zeros(*part.keys.shape[:2], 0, dim, dtype=torch.float32) for dim in part.head_dims]
    sinks = SinkStates(part.positions.padding, *(exact or none))
    return SelectableRows(part.keys, length, pages, part.formats, part.positions, sinks)


class TestChosenRows:
    """Rows of tables and of bases, whose scores are those of attention over them."""

    @pytest.fixture(params=["tables", "basis"])
    def part(self, request, row_case):
        return row_part(row_case, request.param, padding=[0, 40][: row_case.batch_size])

    @pytest.mark.cases("smollm2", "one-token", "unlike-dims", "odd-dims", "large", "long")
    def test_scores_match_float64(self, part, row_case, engine):
        query = torch.randn(row_case.batch_size, row_case.num_heads, row_case.groups, row_case.key_dim)
        length = max(row_case.length - 3, 1)
        scores = score_rows(query, PreparedRows(tokens_of(part, length)))
        keys = torch.cat([tile[0] for tile in decode_tiles(part)], dim=2)[:, :, :length].double()
        assert_near(scores, query.double() @ keys.transpose(2, 3), max(SCORE_TOLERANCE, rounding_of(part, engine)))

    @pytest.mark.parametrize("mask_kind", ["none", "boolean", "added"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.cases("smollm2", "one-token", "unlike-dims", "odd-dims", "large")
    def test_attention_matches_float64(self, part, row_case, level, dtype, mask_kind):
        batch_size, num_heads, length = row_case.batch_size, row_case.num_heads, row_case.length
        most, sinks, sizes = -(-length // 2), min(length, 3), (batch_size, num_heads)
        keys, values = (torch.cat([tile[side] for tile in decode_tiles(part)], dim=2) for side in (0, 1))
        first = torch.tensor([0, 40][:batch_size])
        exact = [torch.randn(*sizes, sinks, dim).to(dtype) for dim in (row_case.key_dim, row_case.value_dim)]
        tokens = PreparedRows(tokens_of(part, length, *exact))
        # Padding is never chosen
        chances = torch.rand(*sizes, length).masked_fill(torch.arange(length) < first[:, None, None], -1)
        slots = chances.topk(most, dim=2).indices
        count = torch.randint(0, most + 1, sizes)
        count[0, 0] = most
        query = torch.randn(*sizes, row_case.groups, row_case.key_dim).to(dtype)
        tail = tuple(torch.randn(*sizes, 5, dim).to(dtype) for dim in (row_case.key_dim, row_case.value_dim))
        mask = None if mask_kind == "none" else torch.rand(batch_size, length + 5) > 0.3
        if mask_kind == "added":
            mask = torch.randn(mask.shape).masked_fill(~mask, -torch.inf)
        call = AttentionCall(query, None if mask is None else mask[:, None, None], scale=0.3)
        output = attend_selected(call, tokens, Selection(slots, count), tail, length)
        order = slots.masked_fill(torch.arange(most) >= count[..., None], 10**6).sort().values
        in_order = attend_selected(call, tokens, Selection(order, count), tail, length)
        torch.testing.assert_close(output, in_order)
        for item in range(batch_size):
            for states, own in zip((keys, values), exact, strict=True):
                states[item, :, first[item] : first[item] + sinks] = own[item].float()
        expected = reference(query, keys, values, slots, count, tail, 0.3, mask, None, length)
        assert output.dtype == dtype
        assert_near(output, expected, max(rounding_of(part, "compiled"), 1e-4 if dtype == torch.float32 else 5e-3))

    @pytest.mark.cases("wide")
    def test_forged_tokens_stay_in_bounds(self, part, row_case, level):
        sinks = SinkStates(None, *torch.ones(2, 2, 2, 1, 64))
        tokens = SelectableRows(part.keys, 129, [part.values], part.formats, part.positions, sinks)
        tail = torch.ones(2, 2, 1, 64), torch.ones(2, 2, 1, 64)
        query = torch.randn(2, 2, 3, 64)
        call = AttentionCall(query, scale=0.3)
        for forged in (*FORGED, 10**12):
            slots, count = torch.full((2, 2, 5), forged), torch.full((2, 2), forged)
            padding = dataclasses.replace(part.positions, padding=torch.tensor([forged, 0]))
            far = dataclasses.replace(tokens, positions=padding)
            for own, of_heads in ((tokens, count), (tokens, torch.full((2, 2), 5)), (far, torch.full((2, 2), 5))):
                output = attend_selected(call, PreparedRows(own), Selection(slots, of_heads), tail, 129)
                assert output.isfinite().all()
        with pytest.raises(ValueError, match="`pages` has to be"):
            bad = dataclasses.replace(tokens, pages=[part.values[..., 1:]])
            attend_selected(call, PreparedRows(bad), Selection(slots, count), tail, 129)
        with pytest.raises(ValueError):
            score_rows(query, PreparedRows(dataclasses.replace(tokens, length=130)))
