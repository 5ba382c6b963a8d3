"""Parts of every form of storage, queries over them, and what attention has to give: one table for all engines."""

import dataclasses
import os
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache_plugins.codecs.basis import basis_for_widths, format_in_basis, round_basis
from kvcache_plugins.codecs.bit_allocation import allocate_widths
from kvcache_plugins.codecs.codec import Sample
from kvcache_plugins.codecs.outliers import Outliers, sort_into_tiles
from kvcache_plugins.codecs.prompt_codec import PromptCodec
from kvcache_plugins.codecs.quantization import quantize
from kvcache_plugins.codecs.rows import RowCodec, SharedFormats
from kvcache_plugins.formats.bits import pack
from kvcache_plugins.formats.groups import Grouping, QuantizedChunks
from kvcache_plugins.formats.parts import DensePart, GroupPart, Part, RowPart
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.quantizer import DISTORTIONS, MAX_WIDTH, num_blocks
from kvcache_plugins.formats.rotary import RotaryLayout, candidate_layouts
from kvcache_plugins.formats.rows import RowFormat
from kvcache_plugins.kernels import library
from kvcache_plugins.kernels.masks import slice_mask
from kvcache_plugins.kernels.ops import apply_rope, decode_tiles


# Triton reads the variable when it is imported, which is before this file is
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Device of Triton's kernels
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
needs_triton = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED, reason="kernels need a GPU or TRITON_INTERPRET=1 in the environment"
)


# A part of rows and queries over it; totals are bytes of the codes of a key and of a value
SIZES = ("batch_size", "num_heads", "groups", "num_queries", "length")
Rows = namedtuple("Rows", [*SIZES, "key_dim", "value_dim", "key_total", "value_total"])
# Sizes of what is scored
Scored = namedtuple("Scored", ["batch_size", "num_heads", "groups", "head_dim", "nbits", "length"])


class Groups(namedtuple("Groups", [*SIZES, "chunks", "chunk_length", "keys", "values"])):
    """A part of groups and queries over it; of a side: channels, bits, axis of groups and their size."""

    key_dim = property(lambda self: self.keys[0])
    value_dim = property(lambda self: self.values[0])


Case = Rows | Groups


def basis_table(num_heads: int, head_dim: int, total: int, rope: RotaryLayout | None = None) -> RowFormat:
    scales = torch.logspace(0, -1.5, head_dim)
    basis = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim))[0] * scales[:, None]
    energies = torch.nn.functional.pad(scales.square(), (0, -head_dim % 8)).unflatten(0, (num_blocks(head_dim), 8))
    # Heads differ in how steeply their energies fall
    energies = torch.stack([energies.sum(dim=1) ** (1 + head) for head in range(num_heads)])
    mean, factors = torch.randn(num_heads, head_dim).half(), torch.rand(num_heads, head_dim) + 0.1
    own = round_basis(basis, factors)
    widths = allocate_widths(energies[None], min(total, num_blocks(head_dim) * MAX_WIDTH), DISTORTIONS)[0]
    return format_in_basis(mean, *basis_for_widths(factors, *own, widths), rope)


def make_layout(head_dim: int, name: str) -> RotaryLayout:
    num_pairs = head_dim // (4 if name == "partial" else 2)
    rates = tuple((10000.0 ** -(torch.arange(num_pairs) / max(num_pairs, 1))).tolist())
    layouts = candidate_layouts(() if name == "none" else rates, head_dim)
    return layouts[{"interleaved": 1, "partial": 2}.get(name, 0)]


def row_states(case, form="tables", layout="half-split", start=4, padding=None, offset=0.0, constant=True):
    """Make keys and values, perhaps with a constant channel, and their codec: with own tables, or in a basis."""
    batch_size, num_heads, _, _, length, *dims, key_total, value_total = case
    totals = [
        min(total, num_blocks(dim) * MAX_WIDTH) for total, dim in zip((key_total, value_total), dims, strict=True)
    ]
    key_dim, value_dim = dims
    rope = make_layout(key_dim, layout)
    keys = torch.randn(batch_size, num_heads, length, key_dim) * torch.rand(key_dim) + torch.randn(key_dim) + offset
    if constant:
        keys[..., key_dim // 2] = 1.5
    values = torch.randn(batch_size, num_heads, length, value_dim)
    positions = Positions(start, None if padding is None else torch.tensor(padding))
    keys = apply_rope(keys, rope, positions)
    if form == "basis":
        tables = (
            basis_table(num_heads, key_dim, totals[0], rope),
            basis_table(num_heads, value_dim, totals[1]),
        )
        return keys, values, RowCodec(SharedFormats(*tables)), positions
    unfitted = PromptCodec((key_dim, value_dim), (totals[0], totals[1]), [rope])
    codec = unfitted.fit(Sample(keys, values, torch.ones(batch_size, length, dtype=torch.bool), None, positions))
    return keys, values, codec, positions


def row_part(case: Rows, *args: Any, mask: torch.Tensor | None = None, **options: Any) -> RowPart:
    """Rows of `row_states`."""
    keys, values, codec, positions = row_states(case, *args, **options)
    return RowPart(*codec.encode(keys, values, positions), codec.formats(), positions, case.length, mask)


def group_side(case: Groups, side: tuple[Any, ...], rank: int, sparsity: float) -> Any:
    dim, nbits, axis, group_size = side
    sizes = case.batch_size, case.num_heads, case.chunks, case.chunk_length
    grouping, length = Grouping(axis, group_size), case.chunk_length
    codes, scale, zero = quantize(torch.randn(*sizes, dim), None, nbits, grouping)
    a = b = indices = values = offsets = None
    if rank:
        a = torch.randn(*sizes[:3], length, rank).half()
        b = (torch.randn(*sizes[:3], dim, rank) * 0.2).half()
    if sparsity:
        shape = case.batch_size, case.chunks, int(sparsity * case.num_heads * length * dim)
        bounds = (case.num_heads, length, dim)
        places = Outliers(*(torch.randint(0, most, shape) for most in bounds), torch.rand(shape) < 0.9)
        indices, values, offsets = sort_into_tiles(places, torch.randn(shape).half(), case.num_heads, length, dim)
    return QuantizedChunks(
        pack(codes, nbits), scale, zero, a, b, indices, values, offsets, nbits, grouping.axis, grouping.group_size, dim
    )


def group_part(case, *, rank=0, sparsity=0.0, is_rotated=False, mask=None) -> GroupPart:
    """Groups whose codes, low rank and outliers are made up."""
    keys, values = (group_side(case, side, rank, sparsity) for side in (case.keys, case.values))
    values = dataclasses.replace(values, is_rotated=is_rotated)
    return GroupPart(keys, values, case.length, mask)


def random_codes(case: Scored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes queries, packed codes and scales with some room beyond, and the keys in float64."""
    length, size = case.length, (case.batch_size, case.num_heads)
    codes = torch.randint(0, 2**case.nbits, (*size, length, case.head_dim), dtype=torch.uint8)
    scale = (torch.rand(*size, length) + 0.1).half()
    keys = scale.double()[..., None] * (codes.double() - (2 ** (case.nbits - 1) - 0.5))
    packed = torch.cat([pack(codes, case.nbits), pack(codes, case.nbits)[:, :, :1] | 255], dim=2)
    scale = torch.cat([scale, torch.full((*size, 1), torch.nan).half()], dim=2)
    return torch.randn(*size, case.groups, case.head_dim), packed, scale, keys


def any_part(case: Case, mask: torch.Tensor | None = None) -> Part:
    """The case's rows by tables, or its groups with low rank and outliers."""
    return row_part(case, mask=mask) if isinstance(case, Rows) else group_part(case, rank=2, sparsity=0.02, mask=mask)


def dense_part(case: Case, length: int, dtype: torch.dtype = torch.float32, mask: Any = None) -> DensePart:
    """Exact tokens with capacity for more."""
    sizes = case.batch_size, case.num_heads, length + 3
    keys, values = (torch.randn(*sizes, dim).to(dtype) for dim in (case.key_dim, case.value_dim))
    return DensePart(keys, values, length, mask)


def make_query(case: Case, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    heads = case.num_heads * case.groups
    return torch.randn(case.batch_size, heads, case.num_queries, case.key_dim).to(dtype)


def make_mask(kind: str, case: Case, length: int) -> torch.Tensor:
    """Masks of left padding, of any shape, and added ones, over a part's tokens; in each somebody may see nothing."""
    shape = case.batch_size, case.num_heads * case.groups, case.num_queries, length
    padding = torch.tensor([3, length])[: case.batch_size]
    if kind == "padding":
        return (torch.arange(length) >= padding[:, None])[:, None, None]
    allowed = torch.rand(shape) > 0.3
    allowed[-1, -1, -1] = False
    return {
        "each head": allowed,
        "heads alike": allowed[:, :1],
        "items alike": allowed[0, 0],
        "added": torch.randn(shape).masked_fill(~allowed, -torch.inf),
        # Transformers' masks: a query that sees nothing attends to all alike
        "lowest": torch.randn(shape).masked_fill(~allowed, torch.finfo(torch.float32).min),
        "fewer columns": allowed[..., : length - 5],
    }[kind]


def exact_attention(query: torch.Tensor, parts: Sequence[Part], num_heads: int) -> torch.Tensor:
    """Softmax over everything at once, in float64; zeros where there is nothing to attend to."""
    keys, values, masks = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
        for part in parts:
            for tile in decode_tiles(part):
                keys.append(tile[0].double())
                values.append(tile[1].double())
            mask = torch.zeros(*query.shape[:3], part.length, dtype=torch.double, device=query.device)
            columns = slice_mask(part.mask, 0, part.length)
            if columns is not None:
                is_boolean = columns.dtype == torch.bool
                mask = mask.masked_fill(~columns, -torch.inf) if is_boolean else mask + columns.double()
            masks.append(mask)
    groups = query.shape[1] // num_heads
    all_keys, all_values = (torch.cat(states, dim=2).repeat_interleave(groups, dim=1) for states in (keys, values))
    scores = query.double() @ all_keys.transpose(-1, -2) * query.shape[3] ** -0.5 + torch.cat(masks, dim=3)
    return scores.softmax(dim=-1).nan_to_num() @ all_values


def rounding_of(part: Part, engine: str) -> float:
    """Tells the relative error that rounding to words of 16 bits may add, in C: of queries and weights for groups, and
    with AVX-512 of levels in bases."""
    if engine != "compiled" or isinstance(part, DensePart):
        return 0.0
    if isinstance(part, GroupPart):
        return 2e-4
    return 2e-3 if part.formats[0].basis is not None and library.level() == "avx512" else 0.0


# Products of heads and queries that kernels are written for: MHA, GQA, MQA; odd lengths, heads of 8 to 640 channels
ROWS = {
    "smollm2": Rows(1, 3, 3, 1, 1000, 64, 64, 19, 16),
    "one-token": Rows(1, 1, 3, 1, 1, 64, 64, 19, 16),
    "wide": Rows(2, 2, 3, 4, 129, 64, 64, 60, 40),
    "no-bits-for-most": Rows(1, 1, 1, 1, 70, 128, 128, 5, 3),
    "least": Rows(1, 2, 3, 3, 63, 8, 8, 3, 3),
    "unlike-dims": Rows(2, 2, 3, 5, 131, 80, 48, 30, 6),
    "odd-dims": Rows(1, 2, 1, 16, 65, 20, 33, 24, 40),
    "large": Rows(1, 1, 3, 2, 200, 300, 256, 64, 64),
    # Beyond the tiles after which the rotation of queries is undone anew
    "long": Rows(1, 1, 3, 1, 5000, 32, 32, 12, 8),
}
GROUPS = {
    "k4v3": Groups(2, 2, 3, 1, 192, 1, 192, (64, 4, "channel", 64), (64, 3, "token", 64)),
    "k2v2": Groups(1, 3, 4, 1, 192, 3, 64, (128, 2, "channel", 32), (128, 2, "token", 64)),
    "one-bit": Groups(1, 1, 1, 1, 170, 2, 100, (64, 1, "channel", 50), (64, 1, "token", 32)),
    "five-and-six-bits": Groups(2, 1, 2, 1, 96, 2, 48, (96, 5, "channel", 16), (96, 6, "token", 48)),
    "eight-bits": Groups(1, 2, 5, 1, 130, 1, 130, (80, 8, "token", 40), (80, 8, "token", None)),
    "kcvt": Groups(2, 3, 3, 2, 140, 2, 70, (64, 4, "channel", None), (64, 4, "token", None)),
    "odd-groups": Groups(2, 2, 3, 3, 77, 2, 40, (20, 3, "channel", 10), (30, 3, "token", 10)),
    "keys-by-token": Groups(1, 2, 6, 1, 65, 1, 65, (36, 4, "token", 12), (36, 5, "token", 9)),
    "least": Groups(1, 2, 1, 1, 1, 1, 1, (8, 2, "channel", None), (8, 2, "token", 8)),
    "widest": Groups(1, 1, 4, 1, 70, 1, 70, (640, 4, "channel", 10), (640, 3, "token", 64)),
    "unlike-dims": Groups(1, 2, 8, 2, 128, 2, 64, (192, 4, "channel", 64), (128, 2, "token", 64)),
    "long": Groups(1, 1, 3, 1, 1990, 20, 100, (64, 4, "channel", 50), (64, 3, "token", 64)),
}
