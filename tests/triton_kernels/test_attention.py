"""Decode attention over groups against dense float64 attention, in Triton's interpreter or on a GPU.

Spare chunks are full of NaN, and so is what kernels write to before they do.
"""

import dataclasses

import pytest
import torch
from kernel_cases import DEVICE, Groups, dense_part, exact_attention, group_part, make_mask, make_query, needs_triton

from kvcache_plugins.formats.parts import DensePart, GroupPart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.triton import prepare_part


pytestmark = needs_triton

TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 5e-3}
HALF, BRAIN = torch.float16, torch.bfloat16


def shape(head_dim, nbits=2, batch=1, heads=2, groups=4, queries=1, chunk=64, chunks=3, cut=0, keys=None, values=None):
    """A case by what is unlike the usual; keys share scales by channel, values by token, or as (axis, size) says."""
    sides = ((head_dim, nbits, *own) for own in (keys or ("channel", None), values or ("token", None)))
    return Groups(batch, heads, groups, queries, chunk * chunks - cut, chunks, chunk, *sides)


def case(sizes, options=None, dtype=torch.float32, mask=None):
    """Sizes, options of `group_part`, dtype of the query, and mask."""
    return sizes, options or {}, dtype, mask


GEAR = {"rank": 4, "sparsity": 0.02}
KEYS_20_VALUES_25 = {"keys": ("channel", 20), "values": ("channel", 25)}
CASES = {
    "kcvt": case(shape(64)),
    "transform": case(shape(64, batch=2, groups=1, chunk=20, chunks=5, cut=7), GEAR),
    "gear-3bit": case(
        shape(64, 3, groups=3, chunk=100, chunks=2, cut=1, queries=2),
        *({"rank": 4, "sparsity": 0.03}, HALF, "heads alike"),
    ),
    "rotated-d80": case(
        shape(80, heads=1, groups=8, chunk=100, chunks=2, cut=99, values=("token", 16)), {**GEAR, "is_rotated": True}
    ),
    "gear-d20-8bit": case(
        shape(20, 8, chunk=20, values=("channel", None)), {"rank": 8, "sparsity": 0.1}, mask="padding"
    ),
    # Narrower than what a product takes
    "gear-d8": case(shape(8, 4), {"sparsity": 0.1}),
    "gear-3bit-d20": case(shape(20, 3, batch=3, keys=("token", None)), {"sparsity": 0.05}),
    "gear-d96-4bit": case(shape(96, 4, cut=40), {"rank": 3, "sparsity": 0.02}, BRAIN),
    "gear-d128": case(shape(128, groups=3, chunks=2), GEAR, BRAIN, "each head"),
    "gear-d256": case(shape(256, heads=1, chunks=2, cut=5), GEAR, HALF),
    "kivi": case(shape(64, chunk=128, chunks=2, cut=30, keys=("channel", 32), values=("token", 32)), dtype=HALF),
    "kivi-64-of-128": case(shape(64, 4, chunk=128, chunks=2, keys=("channel", 64), values=("token", 16))),
    "odd-groups": case(shape(64, heads=1, chunk=100, chunks=2, **KEYS_20_VALUES_25), {"sparsity": 0.02}),
    "token-groups-d80": case(shape(80, 4, cut=1, keys=("token", 20), values=("token", 40))),
    "d32-many-queries": case(shape(32, queries=13), mask="lowest"),
    "sixty-four-rows": case(shape(64, queries=16, chunks=2, heads=1), GEAR, mask="added"),
    "masked-out": case(shape(64, batch=2), GEAR, mask="padding"),
    "padding-added": case(shape(64, batch=3), dtype=HALF, mask="added"),
    **{f"prompt-{length}": case(shape(64, heads=1, chunk=length, chunks=1), GEAR) for length in (1, 63, 65, 129, 300)},
}
# Cases whose properties others have too
LONG = (
    *("gear-3bit-d20", "gear-d96-4bit", "gear-d256", "kivi-64-of-128", "token-groups-d80", "prompt-63", "prompt-129"),
    "padding-added",
)


@pytest.fixture(autouse=True)
def _nan_filled_empties():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def with_spare(tensor):
    """The tensor as a view of one with two more chunks, which are full of NaN (or of the largest integer)."""
    fill = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    spare = torch.full_like(tensor[:, :, :1], fill)
    return torch.cat([tensor, spare, spare], dim=2)[:, :, : tensor.shape[2]].to(DEVICE)


def make_part(case, options, mask=None):
    part = group_part(case, **options)
    keys, values = (side.map(with_spare) for side in (part.keys, part.values))
    return GroupPart(keys, values, case.length, None if mask is None else mask.to(DEVICE))


def check(case, parts, dtype, scale=1.0):
    query = (scale * make_query(case)).to(DEVICE, dtype)
    expected = exact_attention(query, parts, case.num_heads)
    output = attend(query, parts, case.num_heads, kernel="triton")
    assert output.dtype == dtype
    assert (output.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()
    return output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def test_matches_dense_attention(name):
    sizes, options, dtype, kind = CASES[name]
    mask = None if kind is None else make_mask(kind, sizes, sizes.length)
    output = check(sizes, [make_part(sizes, options, mask)], dtype)
    # A fully masked query gets zeros
    assert name != "masked-out" or not output[1].any()


@pytest.mark.parametrize("name", ["gear-3bit", "sixty-four-rows"])
def test_exact_parts_and_several_blocks_equal_dense_attention(name):
    sizes, options, dtype, kind = CASES[name]
    part = make_part(sizes, options, make_mask(kind, sizes, sizes.length))
    masks = [make_mask("heads alike", sizes, length).to(DEVICE) for length in (70, 3)]
    exact = [dense_part(sizes, mask.shape[3], dtype, mask) for mask in masks]
    exact = [dataclasses.replace(each, keys=each.keys.to(DEVICE), values=each.values.to(DEVICE)) for each in exact]
    check(sizes, [part, part, *exact], dtype)


def test_tiles_of_vanishing_probability_do_not_matter():
    case = shape(64, heads=1, chunks=4)
    check(case, [make_part(case, GEAR)], torch.float32, scale=25.0)


def test_splits_do_not_matter(monkeypatch):
    case = shape(32, heads=4, chunk=300, chunks=1)
    part, query, outputs, splits = make_part(case, {}), make_query(case).to(DEVICE), [], []
    monkeypatch.setattr("kvcache_plugins.triton_kernels.attention.attend._MIN_TOKENS_PER_SPLIT", 64)
    for num_sms in (1, 64):
        name = "kvcache_plugins.triton_kernels.attention.attend.device_num_sms"
        monkeypatch.setattr(name, lambda device, number=num_sms: number)
        splits.append(prepare_part(query.unflatten(1, (4, -1)).flatten(2, 3), part, 0.1).launch.result.output.shape[2])
        outputs.append(attend(query, [part], case.num_heads, kernel="triton"))
    assert splits[0] < splits[1]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_splits():
    case = shape(64, chunks=1, cut=64)
    states = torch.randn(2, case.batch_size, case.num_heads, 9, 64, device=DEVICE)
    check(case, [make_part(case, {}), DensePart(*states, 9, None)], torch.float32)
