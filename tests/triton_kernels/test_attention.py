"""Decode attention over compressed storage against dense float64 attention, in Triton's interpreter or on a GPU.

The storage is random, spare chunks are full of NaN, and so is what kernels write to before they do. The dense keys and
values are rebuilt from the format's description here, not with the project's own code.
"""

import os
from dataclasses import dataclass, field

import pytest
import torch

from kvcache_plugins.codecs.groups import CompressedStates
from kvcache_plugins.codecs.outliers import OUTLIER_TILE
from kvcache_plugins.codecs.quantization import Grouping
from kvcache_plugins.triton_kernels.arithmetic import has_pairs
from kvcache_plugins.triton_kernels.attention.attend import prepare
from kvcache_plugins.triton_kernels.attention.combine import prepare_combination
from kvcache_plugins.triton_kernels.attention.dense_part import DensePart
from kvcache_plugins.triton_kernels.attention.outliers import STORED_TILE


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 5e-3}
NAN = float("nan")


@dataclass(frozen=True)
class Side:
    """How keys or values are stored."""

    nbits: int = 2
    axis: str = "channel"
    # Tokens (channel axis) or channels (token axis) that share a scale; `None` is all of them
    group_size: int | None = None
    rank: int = 0
    covered: int | None = None
    outliers: float = 0.0
    shared_scale: bool = False


@dataclass(frozen=True)
class Case:
    """One setting of everything."""

    keys: Side = field(default_factory=Side)
    values: Side = field(default_factory=lambda: Side(axis="token"))
    batch_size: int = 1
    num_heads: int = 2
    groups: int = 4
    num_queries: int = 1
    head_dim: int = 64
    chunk_length: int = 64
    num_chunks: int = 3
    cut: int = 0
    mask: str | None = None
    dtype: torch.dtype = torch.float32
    num_sms: int | None = None
    query_scale: float = 1.0


def random_codes(shape, nbits, generator):
    """Packed codes, each byte written bit by bit, and the codes they stand for."""
    head_dim = shape[-1]
    codes = torch.randint(0, 2**nbits, shape, generator=generator)
    planes = {2: [(2, 0)], 3: [(2, 0), (1, 2)], 4: [(4, 0)], 8: [(8, 0)]}[nbits]
    packed = []
    for width, shift in planes:
        slab = -(-head_dim * width // 8)
        plane = torch.zeros(*shape[:-1], slab, dtype=torch.int64)
        for channel in range(head_dim):
            bits = (codes[..., channel] >> shift) & (2**width - 1)
            plane[..., channel % slab] |= bits << (channel // slab * width)
        packed.append(plane)
    return torch.cat(packed, dim=-1).to(torch.uint8), codes.double()


def random_outliers(case, side, generator):
    """Outlier storage and the dense `[B, H, M, L, D]` matrix that it stands for."""
    size = (case.batch_size, case.num_heads, case.num_chunks, case.chunk_length, case.head_dim)
    places = torch.rand(size, generator=generator) < side.outliers
    dense = torch.where(places, 3 * torch.randn(size, generator=generator), 0).half().double()
    num_tiles = -(-case.chunk_length // 64)
    shift = (case.head_dim - 1).bit_length()
    index_dtype = torch.int16 if 64 << shift <= 32768 else torch.int32
    offsets = torch.zeros(case.batch_size, 1, case.num_chunks, num_tiles * case.num_heads + 1, dtype=torch.int32)
    most = int(places.sum(dim=(1, 3, 4)).max()) + 3
    indices = torch.full((case.batch_size, 1, case.num_chunks, most), -1, dtype=index_dtype)
    values = torch.full(indices.shape, NAN, dtype=torch.float16)
    for item in range(case.batch_size):
        for chunk in range(case.num_chunks):
            count = 0
            for tile in range(num_tiles):
                for head in range(case.num_heads):
                    block = dense[item, head, chunk, tile * 64 : tile * 64 + 64]
                    tokens, channels = block.nonzero(as_tuple=True)
                    # Within a head and tile the order is free
                    order = torch.randperm(len(tokens), generator=generator)
                    tokens, channels = tokens[order], channels[order]
                    here = slice(count, count + len(tokens))
                    indices[item, 0, chunk, here] = ((tokens << shift) | channels).to(index_dtype)
                    values[item, 0, chunk, here] = block[tokens, channels].half()
                    count += len(tokens)
                    offsets[item, 0, chunk, tile * case.num_heads + head + 1] = count
    return indices, values, offsets, dense


def with_spare(tensor, num_spare):
    """The tensor as a view of one with more chunks, which are full of NaN (or of the largest integer)."""
    fill = NAN if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    size = list(tensor.shape)
    size[2] += num_spare
    storage = torch.full(size, fill, dtype=tensor.dtype)
    storage[:, :, : tensor.shape[2]] = tensor
    return storage


def random_side(case, side, generator):
    """Random storage of one side and its dense float64 states `[B, H, M * L, D]`."""
    size = (case.batch_size, case.num_heads, case.num_chunks, case.chunk_length, case.head_dim)
    packed, states = random_codes(size, side.nbits, generator)
    heads = 1 if side.shared_scale else case.num_heads
    if side.axis == "channel":
        num_groups = case.chunk_length // (side.group_size or case.chunk_length)
        grouped = (case.batch_size, heads, case.num_chunks, num_groups, case.head_dim)
    else:
        num_groups = case.head_dim // (side.group_size or case.head_dim)
        grouped = (case.batch_size, heads, case.num_chunks, case.chunk_length, num_groups)
    step = ((0.5 + torch.rand(grouped, generator=generator)) * 3 / (2**side.nbits - 1)).half()
    zero = (torch.randn(grouped, generator=generator) - 1.5).half()
    repeats = case.chunk_length // num_groups if side.axis == "channel" else case.head_dim // num_groups
    dimension = 3 if side.axis == "channel" else 4
    states = states * step.double().repeat_interleave(repeats, dimension)
    states += zero.double().repeat_interleave(repeats, dimension)
    a = b = indices = values = offsets = None
    if side.rank:
        covered = case.chunk_length if side.covered is None else side.covered
        a = torch.randn(*size[:3], covered, side.rank, generator=generator).half()
        b = (0.5 * torch.randn(*size[:3], case.head_dim, side.rank, generator=generator)).half()
        states[:, :, :, case.chunk_length - covered :] += a.double() @ b.double().transpose(-1, -2)
    if side.outliers:
        indices, values, offsets, dense = random_outliers(case, side, generator)
        states += dense
    tensors = (packed, step, zero, a, b, indices, values, offsets)
    stored = (None if tensor is None else with_spare(tensor, 2).to(DEVICE) for tensor in tensors)
    grouping = Grouping(side.axis, None)
    return CompressedStates(*stored, side.nbits, grouping, case.head_dim), states.flatten(2, 3)


def random_mask(case, length, generator):
    """A mask of the kind that the case names, `None` for none."""
    shape = {
        "padding": (case.batch_size, 1, 1, length),
        "queries": (case.batch_size, 1, case.num_queries, length),
        "heads": (1, case.num_heads * case.groups, case.num_queries, length),
        "nothing": (case.batch_size, 1, 1, length),
    }
    if case.mask is None:
        return None
    kind = case.mask.removesuffix("-added")
    allowed = torch.rand(shape[kind], generator=generator) < 0.7
    if kind == "nothing":
        allowed[0] = False
    if not case.mask.endswith("-added"):
        return allowed.to(DEVICE)
    added = torch.randn(shape[kind], generator=generator)
    return (
        torch.where(allowed, added, torch.finfo(case.dtype).min if kind != "nothing" else -torch.inf)
        .to(case.dtype)
        .to(DEVICE)
    )


def expected_attention(case, query, parts, scale):
    """Dense float64 attention; `parts` are (keys, values, mask) along the sequence."""
    scores, values = [], []
    for keys, part_values, mask in parts:
        score = query.double() @ keys.double().transpose(-1, -2) * scale
        if mask is not None:
            mask = mask.expand(case.batch_size, case.num_heads * case.groups, case.num_queries, -1)
            mask = mask.reshape(*score.shape[:3], -1)
            score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask.double()
        scores.append(score)
        values.append(part_values.double())
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).nan_to_num(0.0)
    return weights @ torch.cat(values, dim=2)


def relative_error(actual, expected):
    """Root of the mean squared error over that of the expected values."""
    return ((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


@pytest.fixture(autouse=True)
def _nan_filled_empties():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


GEAR_KEYS = Side(nbits=2, axis="channel", rank=4, outliers=0.02)
GEAR_VALUES = Side(nbits=2, axis="token", rank=2, outliers=0.02, shared_scale=True)
KIVI_KEYS = Side(nbits=2, axis="channel", group_size=32)
KIVI_VALUES = Side(nbits=2, axis="token", group_size=32)
HALF, BRAIN = torch.float16, torch.bfloat16
CASES = {
    "kcvt": Case(),
    "gear": Case(GEAR_KEYS, GEAR_VALUES, batch_size=3, groups=1, chunk_length=20, num_chunks=5, cut=7, num_sms=1),
    "gear-3bit": Case(
        Side(nbits=3, rank=4, outliers=0.03, covered=17),
        Side(nbits=3, axis="token", rank=1, outliers=0.03, covered=1),
        groups=3,
        chunk_length=100,
        num_chunks=2,
        cut=1,
        num_queries=2,
        mask="queries",
        dtype=HALF,
    ),
    "gear-d80": Case(
        GEAR_KEYS, GEAR_VALUES, head_dim=80, num_heads=1, groups=8, chunk_length=100, num_chunks=2, cut=99
    ),
    "gear-d20-8bit": Case(
        Side(nbits=8, rank=8, outliers=0.1), Side(nbits=8, outliers=0.1), head_dim=20, chunk_length=20, mask="padding"
    ),
    # Narrower than what a product takes
    "gear-d8": Case(Side(nbits=4, outliers=0.1), Side(nbits=4, axis="token", outliers=0.1), head_dim=8),
    "gear-3bit-d20": Case(Side(nbits=3, axis="token"), Side(nbits=3, outliers=0.05), head_dim=20, batch_size=3),
    "gear-d96-4bit": Case(
        Side(nbits=4, rank=3, outliers=0.02), Side(nbits=4, axis="token", rank=3), head_dim=96, dtype=BRAIN, cut=40
    ),
    "gear-d128": Case(GEAR_KEYS, GEAR_VALUES, head_dim=128, groups=3, num_chunks=2, mask="heads", dtype=BRAIN),
    "gear-d256": Case(GEAR_KEYS, GEAR_VALUES, head_dim=256, num_heads=1, num_chunks=2, cut=5, dtype=HALF),
    "kivi": Case(KIVI_KEYS, KIVI_VALUES, chunk_length=128, num_chunks=2, cut=30, dtype=HALF),
    "kivi-64-of-128": Case(
        Side(nbits=4, group_size=64), Side(nbits=4, axis="token", group_size=16), chunk_length=128, num_chunks=2
    ),
    "odd-groups": Case(
        Side(nbits=2, group_size=20), Side(nbits=2, group_size=25, outliers=0.02), chunk_length=100, num_chunks=2
    ),
    "token-groups-d80": Case(
        Side(nbits=4, axis="token", group_size=20), Side(nbits=8, axis="token", group_size=40), head_dim=80, cut=1
    ),
    "d32-many-queries": Case(head_dim=32, num_queries=13, groups=4, mask="queries-added"),
    "sixty-four-rows": Case(GEAR_KEYS, GEAR_VALUES, num_queries=16, num_chunks=2, num_heads=1, mask="heads-added"),
    "masked-out": Case(GEAR_KEYS, GEAR_VALUES, batch_size=3, mask="nothing"),
    "masked-out-added": Case(GEAR_KEYS, GEAR_VALUES, batch_size=3, mask="nothing-added"),
    # Whole tiles whose probabilities are all too small for a normal float32
    "peaked": Case(GEAR_KEYS, GEAR_VALUES, num_chunks=4, query_scale=25.0, num_sms=1),
    "padding-added": Case(batch_size=3, mask="padding-added", dtype=HALF),
}
for prompt_length in (1, 63, 65, 129, 300):
    CASES[f"prompt-{prompt_length}"] = Case(
        Side(nbits=2, rank=4, outliers=0.02),
        Side(nbits=2, axis="token", rank=4, outliers=0.02, covered=prompt_length // 2 or 1, shared_scale=True),
        num_heads=1,
        chunk_length=prompt_length,
        num_chunks=1,
        num_sms=2,
    )


def attend(case):
    """The kernels' attention and the expected one, without and with exact parts."""
    generator = torch.Generator().manual_seed(0)
    keys, dense_keys = random_side(case, case.keys, generator)
    values, dense_values = random_side(case, case.values, generator)
    length = case.num_chunks * case.chunk_length - case.cut
    rows = case.groups * case.num_queries
    query = torch.randn(case.batch_size, case.num_heads, rows, case.head_dim, generator=generator)
    query = (query * case.query_scale).to(DEVICE, case.dtype)
    mask = random_mask(case, length, generator)
    scale = case.head_dim**-0.5
    partials = prepare(
        query,
        keys,
        values,
        num_chunks=case.num_chunks,
        length=length,
        mask=mask,
        scale=scale,
        num_sms=case.num_sms,
        packed=has_pairs(query.device.type),
    )()
    blocks = [(dense_keys[:, :, :length].to(DEVICE), dense_values[:, :, :length].to(DEVICE), mask)]
    return query, partials, blocks, scale, generator


# What these hold others hold too
LONG = (
    *("gear-3bit-d20", "gear-d96-4bit", "gear-d256", "kivi-64-of-128", "token-groups-d80", "masked-out-added"),
    *("prompt-63", "prompt-129"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def test_matches_dense_attention(name):
    case = CASES[name]
    query, partials, blocks, scale, _ = attend(case)
    assert not any(tensor.isnan().any() for tensor in partials)
    expected = expected_attention(case, query, blocks, scale)
    actual = prepare_combination([partials], [], query, scale)()
    assert actual.dtype == case.dtype
    assert relative_error(actual, expected) < TOLERANCE[case.dtype]


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["kcvt", "gear-3bit", "gear-d80", "sixty-four-rows", "masked-out"])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_combine_attends_to_exact_parts(name, num_parts):
    case = CASES[name]
    query, partials, blocks, scale, generator = attend(case)
    exact_parts = []
    for num_tokens in (70, 3)[:num_parts]:
        size = (case.batch_size, case.num_heads, num_tokens, case.head_dim)
        keys, values = (torch.randn(size, generator=generator).to(DEVICE, case.dtype) for _ in range(2))
        mask = random_mask(case, num_tokens, generator)
        exact_parts.append(DensePart(keys, values, mask))
        blocks.append((keys, values, mask))
    # The same block twice: more than one may be merged
    blocks.append(blocks[0])
    expected = expected_attention(case, query, blocks, scale)
    actual = prepare_combination([partials, partials], exact_parts, query, scale)()
    assert relative_error(actual, expected) < TOLERANCE[case.dtype]


def test_rows_that_attend_to_nothing_are_zero():
    case = CASES["masked-out"]
    query, partials, _, scale, _ = attend(case)
    assert (partials.maximum[0] == -torch.inf).all()
    assert (partials.total[0] == 0).all()
    output = prepare_combination([partials], [], query, scale)()
    assert (output[0] == 0).all()
    assert (output[1:] != 0).all()


def test_splits_do_not_matter():
    case = CASES["prompt-300"]
    outputs = []
    for num_sms in (1, 64):
        sizes = {"num_heads": 6, "chunk_length": 520, "num_sms": num_sms}
        query, partials, _, scale, _ = attend(Case(**{**vars(case), **sizes}))
        outputs.append((partials.output.shape[2], prepare_combination([partials], [], query, scale)()))
    assert outputs[0][0] != outputs[1][0]
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_splits():
    case = Case(num_chunks=1, cut=64)
    query, partials, _, scale, generator = attend(case)
    assert partials.output.shape[2] == 0
    size = (case.batch_size, case.num_heads, 9, case.head_dim)
    keys, values = (torch.randn(size, generator=generator).to(DEVICE) for _ in range(2))
    actual = prepare_combination([partials], [DensePart(keys, values)], query, scale)()
    expected = expected_attention(case, query, [(keys, values, None)], scale)
    assert relative_error(actual, expected) < TOLERANCE[case.dtype]


def test_kernels_know_the_stored_format():
    assert STORED_TILE.value == OUTLIER_TILE
