"""Attention over groups in C against plain PyTorch in float64, at every level of instructions."""

import dataclasses

import pytest
import torch

from kvcache_plugins.codecs.groups import CompressedStates
from kvcache_plugins.codecs.outliers import OutlierPlaces, index_dtype, sort_into_tiles
from kvcache_plugins.codecs.parts import CompressedPart, DensePart
from kvcache_plugins.codecs.quantization import Grouping, pack, quantize
from kvcache_plugins.kernels import library
from kvcache_plugins.kernels.attention import attend, prepare_tokens
from kvcache_plugins.kernels.compiled import call_of
from kvcache_plugins.kernels.masks import slice_mask


@pytest.fixture(params=library.levels_here(), autouse=True)
def level(request, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", request.param)


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make_side(sizes, dim, nbits, axis, group_size, rank=0, a_tokens=None, sparsity=0.0, is_rotated=False):
    """States whose codes, low rank and outliers are made up; `sizes`: items, heads, chunks, tokens a chunk."""
    batch_size, num_heads, chunks, length = sizes
    grouping = Grouping(axis, group_size)
    codes, scale, zero = quantize(torch.randn(*sizes, dim), None, nbits, grouping)
    a = b = indices = values = offsets = None
    if rank:
        a = torch.randn(*sizes[:3], length if a_tokens is None else a_tokens, rank).half()
        b = (torch.randn(*sizes[:3], dim, rank) * 0.2).half()
    if sparsity:
        count = int(sparsity * num_heads * length * dim)
        shape = batch_size, chunks, count
        bounds = (num_heads, length, dim)
        places = OutlierPlaces(*(torch.randint(0, most, shape) for most in bounds), torch.rand(shape) < 0.9)
        indices, values, offsets = sort_into_tiles(places, torch.randn(shape).half(), num_heads, length, dim)
    return CompressedStates(
        pack(codes, nbits), scale, zero, a, b, indices, values, offsets, nbits, grouping, dim, is_rotated
    )


def exact_attention(query, parts, num_heads):
    keys, values, masks = [], [], []
    for part in parts:
        tiles = list(part.tiles())
        keys += [tile[0].double() for tile in tiles]
        values += [tile[1].double() for tile in tiles]
        mask = torch.zeros(query.shape[0], query.shape[1], query.shape[2], part.length, dtype=torch.double)
        columns = slice_mask(part.mask, 0, part.length)
        masks.append(mask if columns is None else mask.masked_fill(~columns, -torch.inf))
    groups = query.shape[1] // num_heads
    keys, values = (torch.cat(states, dim=2).repeat_interleave(groups, dim=1) for states in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * query.shape[3] ** -0.5 + torch.cat(masks, dim=3)
    return scores.softmax(dim=-1).nan_to_num() @ values


# Items, heads, chunks, tokens a chunk; tokens in use; queries a head, new tokens; keys and values
CASES = {
    "k4v3": ((2, 2, 1, 192), 192, 3, 1, (64, 4, "channel", 64), (64, 3, "token", 64)),
    "k2v2": ((1, 3, 3, 64), 192, 4, 1, (128, 2, "channel", 32), (128, 2, "token", 64)),
    "one bit, one query": ((1, 1, 2, 100), 170, 1, 1, (64, 1, "channel", 50), (64, 1, "token", 32)),
    "five and six bits": ((2, 1, 2, 48), 96, 2, 1, (96, 5, "channel", 16), (96, 6, "token", 48)),
    "eight bits": ((1, 2, 1, 130), 130, 5, 1, (80, 8, "token", 40), (80, 8, "token", None)),
    "kcvt": ((2, 3, 2, 70), 140, 3, 2, (64, 4, "channel", None), (64, 4, "token", None)),
    "odd dims, odd groups": ((2, 2, 2, 40), 77, 3, 3, (20, 3, "channel", 10), (30, 3, "token", 10)),
    "keys in odd groups of a token": ((1, 2, 1, 65), 65, 6, 1, (36, 4, "token", 12), (36, 5, "token", 9)),
    "least": ((1, 2, 1, 1), 1, 1, 1, (8, 2, "channel", None), (8, 2, "token", 8)),
    "widest": ((1, 1, 1, 70), 70, 4, 1, (640, 4, "channel", 10), (640, 3, "token", 64)),
    "unlike dims": ((1, 2, 2, 64), 128, 8, 2, (192, 4, "channel", 64), (128, 2, "token", 64)),
}


def make_part(name, mask=None, **options):
    sizes, length, _, _, key_options, value_options = CASES[name]
    is_rotated = options.pop("is_rotated", False)
    keys = make_side(sizes, *key_options, **options)
    values = make_side(sizes, *value_options, **options, is_rotated=is_rotated)
    return CompressedPart(keys, values, length, mask)


def make_query(name, dtype=torch.float32):
    (batch_size, num_heads, *_), _, group, num_queries, (dim, *_), _ = CASES[name]
    return torch.randn(batch_size, num_heads * group, num_queries, dim).to(dtype)


def make_dense(name, length, mask=None):
    (batch_size, num_heads, *_), _, _, _, (dim, *_), (value_dim, *_) = CASES[name]
    states = [torch.randn(batch_size, num_heads, length + 2, size) for size in (dim, value_dim)]
    return DensePart(*states, length, mask)


def check(name, parts, dtype=torch.float32, tolerance=2e-5):
    query, num_heads = make_query(name, dtype), CASES[name][0][1]
    expected = exact_attention(query, parts, num_heads)
    output = attend(query, parts, num_heads, kernel="compiled")
    assert output.dtype == dtype
    assert (output.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_rotated": True},
        {"rank": 4},
        {"rank": 3, "a_tokens": 1, "sparsity": 0.1},
        {"rank": 1, "is_rotated": True, "sparsity": 0.03},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name, options):
    check(name, [make_part(name, **options), make_dense(name, 3)])


@pytest.mark.parametrize("name", ["k4v3", "odd dims, odd groups"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matches_float64_in_half_precision(name, dtype):
    check(name, [make_part(name, rank=2, sparsity=0.02)], dtype, 4e-3)


def test_wide_indices_of_outliers():
    part = make_part("widest", sparsity=0.02)
    assert part.keys.outlier_indices.dtype == index_dtype(640) == torch.int32
    check("widest", [part])


def test_ranks_beyond_a_block_of_factors():
    check("k4v3", [make_part("k4v3", rank=64)], tolerance=1e-4)


@pytest.mark.parametrize("name", ["k4v3", "odd dims, odd groups"])
def test_left_padding(name):
    (batch_size, *_), length, *_ = CASES[name]
    mask = torch.arange(length) >= torch.tensor([3, length])[:batch_size, None]
    check(name, [make_part(name, mask[:, None, None], rank=2), make_dense(name, 2)])


def test_threads_share_a_sequence(num_threads):
    CASES["long"] = ((1, 1, 20, 100), 1990, 3, 1, (64, 4, "channel", 50), (64, 3, "token", 64))
    try:
        # Of so many values the average is close to nothing
        parts = [make_part("long", rank=2, sparsity=0.02, is_rotated=True), make_dense("long", 5)]
        check("long", parts, tolerance=1e-4)
    finally:
        del CASES["long"]


def test_strided_states_are_copied():
    part = make_part("k4v3", rank=2, sparsity=0.02)
    wider = [
        side.map(lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0]) for side in (part.keys, part.values)
    ]
    part = CompressedPart(*wider, part.length, None)
    assert not part.keys.codes.is_contiguous()
    check("k4v3", [part])
    assert prepare_tokens(make_query("k4v3"), [part, make_dense("k4v3", 1)], 2, None) is None


@pytest.mark.parametrize("name", ["k4v3", "kcvt"])
def test_prepared_calls_equal_those_made_anew(name):
    part, dense = make_part(name, rank=2, sparsity=0.02), make_dense(name, 1)
    call = prepare_tokens(make_query(name), [part, dense], CASES[name][0][1], None)
    storage = dense.keys, dense.values
    for length in (1, 2, 3):
        query = make_query(name)
        now = DensePart(*storage, length, None)
        expected = attend(query, [part, now], CASES[name][0][1], kernel="compiled")
        assert torch.equal(call.attend(query, None, storage, length, None), expected)


@pytest.mark.parametrize("offsets", [[2**31 - 1, -(2**31)], [-(2**31), 2**31 - 1], None])
def test_forged_outliers_touch_nothing_else(offsets):
    part, forged = make_part("k4v3", sparsity=0.05), {}
    for name in ("keys", "values"):
        side = getattr(part, name)
        random = torch.randint(-(2**15), 2**15, side.outlier_indices.shape, dtype=torch.int16)
        places = torch.randint(-(2**31), 2**31, side.outlier_offsets.shape, dtype=torch.int32)
        if offsets is not None:
            places.view(-1).copy_(torch.tensor(offsets).repeat(places.numel())[: places.numel()])
        forged[name] = side.replace({"outlier_indices": random, "outlier_offsets": places})
    output = attend(
        make_query("k4v3"), [CompressedPart(**forged, length=part.length, mask=None)], 2, kernel="compiled"
    )
    assert output.isfinite().all()


class TestRefusals:
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
    def test_tensors_of_other_kinds_or_sizes(self, name, change):
        part = make_part("k4v3", rank=2, sparsity=0.05)
        for side in ("keys", "values"):
            states = getattr(part, side)
            wrong = dataclasses.replace(part, **{side: states.replace({name: change(getattr(states, name))})})
            with pytest.raises(ValueError, match="scale" if name == "scale" else "of shape|has to be"):
                attend(make_query("k4v3"), [wrong], 2, kernel="compiled")

    def test_more_tokens_than_chunks_hold(self):
        part = dataclasses.replace(make_part("k4v3"), length=193)
        with pytest.raises(ValueError, match="193 tokens of 1 chunks of 192"):
            call_of(make_query("k4v3"), [part], 2, 0.1)

    def test_parts_of_other_items(self):
        with pytest.raises(ValueError, match="compressed keys and values have to be"):
            call_of(make_query("k4v3")[:1], [make_part("k4v3")], 2, 0.1)

    def test_groups_and_rotations_of_the_other_side(self):
        part = make_part("k4v3", is_rotated=True)
        for wrong in (dataclasses.replace(part, values=part.keys), dataclasses.replace(part, keys=part.values)):
            with pytest.raises(ValueError, match="groups of a token, and keys that are not rotated"):
                call_of(make_query("k4v3"), [wrong], 2, 0.1)


def test_heads_too_large_for_the_kernel_run_in_pytorch():
    CASES["huge"] = ((1, 1, 1, 64), 64, 2, 1, (648, 4, "channel", 64), (648, 4, "token", None))
    try:
        part = make_part("huge")
        check("huge", [part])
        dense = make_dense("huge", 1)
        assert prepare_tokens(make_query("huge"), [part, dense], 1, None) is None
    finally:
        del CASES["huge"]
