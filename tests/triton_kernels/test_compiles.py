"""Triton's kernels compile for GPUs that are not there, NVIDIA's since sm_80 and AMD's, and stay in their registers.

In a process of its own, because Triton decides when it is imported whether it interprets. Running this file (`python
tests/triton_kernels/test_compiles.py 90`) prints the table, or the rows of variants that are named behind it.
"""

import itertools
import json
import re
import sys
from typing import Any

import pytest
import torch

from kvcache_plugins.eval.benchmarks.kernels import Listing, compile_for, resources, run_tool
from kvcache_plugins.formats.groups import QuantizedChunks
from kvcache_plugins.formats.rows import Basis, RowFormat


BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
PLAIN = (("channel", None), 0, False), (("token", None), 0, False)
KIVI = (("channel", 32), 0, False), (("token", 32), 0, False)
TOKENS = (("token", None), 0, False), (("token", None), 0, False)
GEAR = (("channel", None), 4, True), (("token", None), 4, True)


def of_rank(rank):
    return (("channel", None), rank, False), (("token", None), rank, False)


# Bits, (axis and size of groups, rank, outliers) of keys and of values, head dim, query's dtype, mask's dtype
GROUPS = {
    "kcvt-2bit-d64": (2, PLAIN, 64, HALF, None),
    "kcvt-2bit-d128": (2, PLAIN, 128, BRAIN, None),
    "kcvt-8bit-d128": (8, PLAIN, 128, BRAIN, None),
    "kcvt-4bit-d128-float32": (4, PLAIN, 128, SINGLE, None),
    "kivi-2bit-d128": (2, KIVI, 128, BRAIN, None),
    "token-token-4bit-d128": (4, TOKENS, 128, BRAIN, torch.bool),
    "gear-l-2bit-d128": (2, of_rank(4), 128, BRAIN, None),
    "gear-2bit-d64": (2, GEAR, 64, HALF, torch.bool),
    "gear-2bit-d128": (2, GEAR, 128, BRAIN, BRAIN),
    "gear-3bit-d128": (3, GEAR, 128, BRAIN, None),
    "gear-2bit-d256": (2, GEAR, 256, BRAIN, None),
    # A kernel has both 2 and 4 in it, or one other rank
    **{f"rank-{rank}": (2, of_rank(rank), 64, HALF, None) for rank in (1, 2, 3, 8)},
}
# Launches of `combine` (head dim, query's dtype) over 128 rows that ask for most, one whose loads run ahead, and one
# with lengths that are read on the device
COMBINATIONS = {"combine-d128": (128, SINGLE), "combine-d256-bfloat16": (256, BRAIN), "combine-d256": (256, SINGLE)}
COMBINATIONS |= {"combine-d128-device": (128, BRAIN)}
# Launches that make sums of states of those in a basis of each head, or of rotated values: head dim
FINISHES = {"finish-basis-d128": 128, "finish-basis-d300": 300, "finish-rotation-d80": 80}
# Head dim, bytes of a key's and of a value's codes, query's dtype, queries, mask's dtype, padding; those that begin
# with a `c` are in calibrated bases
ROWS = {
    "t16-d64": (64, 19, 16, BRAIN, 3, None, False),
    "t16-d128": (128, 38, 32, BRAIN, 4, None, False),
    "t30-d128-rows16": (128, 80, 64, HALF, 16, BRAIN, True),
    "t16-d256": (256, 76, 64, BRAIN, 4, torch.bool, False),
    "t16-d128-float32": (128, 38, 32, SINGLE, 4, None, False),
    "c16-d64": (64, 18, 18, BRAIN, 3, None, False),
    "c16-d128": (128, 36, 36, BRAIN, 4, None, False),
}
# Bases that want much shared memory, and components of keys where they are not as many as channels
BASES = {
    "c-d80-float32": (80, 20, 20, SINGLE, 4, None, False),
    "c-d128-rows16": (128, 36, 36, HALF, 16, torch.bool, True),
    "c-d128-float32": (128, 36, 36, SINGLE, 4, None, False),
    "c-d256": (256, 64, 64, HALF, 4, None, False),
    "c-d256-scores": (256, 64, 64, HALF, 4, None, False),
    "c-d256-float32": (256, 64, 64, SINGLE, 16, None, False),
    "c-d300-float32": (300, 80, 80, SINGLE, 4, None, False),
}
COMPONENTS = {"c-d80-float32": 4, "c-d256-scores": 128, "c-d300-float32": 64}
ROWS |= BASES
# With lengths that are read on the device
ROWS |= {f"{name}-device": ROWS[name] for name in ("t16-d64", "t16-d128", "c16-d64")}
ROWS |= {f"{name}-scores": ROWS[name] for name in ("t16-d128", "c16-d64")}
# Whole steps over rows: head dim, queries, their dtype
ROW_STEPS = {
    "row-step-d64": (64, 3, BRAIN),
    "row-step-d128": (128, 4, BRAIN),
    "row-step-d128-rows16": (128, 16, HALF),
    "row-step-d128-float32": (128, 4, SINGLE),
    "row-step-d256": (256, 4, BRAIN),
}
# Head dim, bytes of codes, dtype of the states
CODING = {
    "code-keys-d64": (64, 32, BRAIN),
    "code-values-d64": (64, 26, BRAIN),
    "code-keys-d80": (80, 40, HALF),
    "code-keys-d128": (128, 64, BRAIN),
    "code-values-d128": (128, 52, BRAIN),
    "code-values-d128-float32": (128, 52, SINGLE),
    "code-keys-d256": (256, 128, BRAIN),
    "code-values-d256": (256, 104, BRAIN),
    "code-calibrated-keys-d64": (64, 18, BRAIN),
    "code-calibrated-keys-d128": (128, 36, BRAIN),
    "code-calibrated-values-d128-float32": (128, 36, SINGLE),
    "code-calibrated-keys-d256": (256, 72, BRAIN),
    "push-d128": (128, 64, BRAIN),
    "push-d256": (256, 128, BRAIN),
    "push-calibrated-d128": (128, 36, BRAIN),
}
# Options of `GEARConfig`, head dim, heads, dtype of the states: both launches of a push into chunks
GROUP_PUSHES = {
    "group-push-gear-d128": ({}, 128, 8, BRAIN),
    "group-push-gear-2bit-d128": ({"key_nbits": 2, "value_nbits": 2}, 128, 8, BRAIN),
    "group-push-gear-2bit-d64": ({"key_nbits": 2, "value_nbits": 2}, 64, 2, HALF),
    "group-push-gear-2bit-d128-mha": ({"key_nbits": 2, "value_nbits": 2}, 128, 32, BRAIN),
    "group-push-gear-2bit-d256": ({"key_nbits": 2, "value_nbits": 2}, 256, 8, BRAIN),
    "group-push-kivi-2bit-d128": ({"key_nbits": 2, "value_nbits": 2, "rank": 0, "sparsity": 0.0}, 128, 8, BRAIN),
    "group-push-gear-k4v3-d128": (
        {"value_nbits": 3, "backbone": "kivi", "rotate_values": True, "rank": 0, "sparsity": 0.0},
        *(128, 8, BRAIN),
    ),
}
# Numbers of a row, their dtype, whether rows are counted, and whether they lie so that 16 bytes are moved at once
MOVES = {
    "gather-256": (256, BRAIN, True, True),
    "gather-72": (72, BRAIN, True, True),
    "gather-1024": (1024, SINGLE, True, True),
    "gather-130": (130, BRAIN, False, False),
    "gather-129": (129, HALF, False, False),
    "write-256": (256, BRAIN, False, True),
    "write-129": (129, HALF, False, False),
}
# Head dim, queries a head, bits
SCORES = {
    "score-d128-g4": (128, 4, 4),
    "score-d128-g7": (128, 7, 2),
    "score-8bit": (128, 4, 8),
    "score-d80": (80, 1, 2),
    "score-d256": (256, 8, 4),
    "score-d128-g64": (128, 64, 4),
}
# Steps of InfiniGen: head dim, query heads a key/value head, dtype
STEPS = {
    "step-d128-g4": (128, 4, BRAIN),
    "step-d128-g1-float32": (128, 1, SINGLE),
    "step-d64-g3": (64, 3, HALF),
    "step-d256-g8": (256, 8, BRAIN),
    "step-d80-g32": (80, 32, HALF),
}
VARIANTS = {
    **STEPS,
    **GROUPS,
    **COMBINATIONS,
    **FINISHES,
    **ROWS,
    **ROW_STEPS,
    **CODING,
    **GROUP_PUSHES,
    **MOVES,
    **SCORES,
}
# Daily variants by target, one of each kernel: groups without and with low rank, rows without and with a basis
DAILY = {
    "90": [
        *("kivi-2bit-d128", "gear-l-2bit-d128", "t16-d128", "c16-d64", "code-keys-d128", "code-values-d256"),
        *("push-d128", "gather-256", "gather-129", "write-256", "score-d128-g4", "score-8bit", "step-d128-g4"),
        *("group-push-gear-2bit-d128", "finish-basis-d128", "row-step-d64"),
    ],
    "gfx942": ["kivi-2bit-d128"],
}
_CODING = ["code-keys-d128", "code-values-d128", "code-values-d256", "code-calibrated-keys-d128", "push-d128"]
_CODING += ["push-calibrated-d128"]
_RANKS = ["rank-1", "rank-2", "rank-3", "rank-8"]
LONG = {
    "80": [
        *("kcvt-2bit-d64", "kivi-2bit-d128", "gear-2bit-d64", "gear-2bit-d128", *_RANKS, *_CODING, *MOVES, *SCORES),
        *GROUP_PUSHES,
        *("t30-d128-rows16", "c16-d64", "t16-d256", "t16-d64-device", "c-d80-float32", "c-d128-float32", "c-d256"),
        *(*STEPS, *FINISHES, "row-step-d128"),
    ],
    "86": ["kivi-2bit-d128", *COMBINATIONS, "t16-d64-device", "c16-d64-device", *_CODING],
    "120": ["kivi-2bit-d128", *_CODING],
    "90": [
        *("kcvt-2bit-d128", "kcvt-8bit-d128", "kcvt-4bit-d128-float32", "token-token-4bit-d128", "gear-3bit-d128"),
        *(
            "gear-2bit-d256",
            *_RANKS,
            "combine-d256-bfloat16",
            "combine-d256",
            "combine-d128-device",
            *FINISHES,
            *CODING,
            *GROUP_PUSHES,
            *MOVES,
            *SCORES,
            *STEPS,
            *ROW_STEPS,
        ),
        *("t16-d64", "t16-d128-float32", "c16-d64", "c16-d128", "t16-d128-device", *BASES),
    ],
    "gfx942": _CODING,
    "gfx90a": ["kivi-2bit-d128"],
}
# Warp instructions a cached number of the loop over whole tiles, on an H100, and how much more is taken for the same
COUNTS = {"t16-d64": 0.223, "t16-d128": 0.198, "c16-d64": 0.268, "c16-d128": 0.246}
MARGIN = 0.05
# Bytes that a thread of attention over groups, or of a push into them, may spill. If 168 or 128 registers let one more
# program run at once, the assembler itself puts a few into local memory rather than use another register
MAX_SPILLED = 32
MAY_SPILL = {*GROUPS, *COMBINATIONS, *GROUP_PUSHES}
# Kernels that spill more must not get worse: those with low rank and outliers both, mostly numbers used once a chunk,
# and those of two parts (ranks and padding are data, so that one kernel serves all prompts, which costs registers);
# bases of 128 channels, which do not fit into registers; and pushes of 256 channels, where a tail is packed
SPILLED = {
    **{("attend", "gear-2bit-d64"): 72, ("attend", "gear-2bit-d128"): 176, ("attend", "gear-3bit-d128"): 168},
    **{("attend", "gear-l-2bit-d128"): 64, ("attend", "kcvt-4bit-d128-float32"): 64},
    ("90", "c16-d128"): 24,
    ("choose", "step-d128-g1-float32"): 8,
    ("90", "push-d256"): 48,
    ("90", "code-calibrated-values-d128-float32"): 24,
}
# Shared memory of a program, in bytes: the least of any GPU since sm_80 (RTX 30 and 40), AMD's, and that of an H200
MAX_SHARED, MAX_SHARED_AMD, MAX_SHARED_H200 = 99 * 1024, 65536, 232448
# Loads, stores and copies of more than the eight bytes of a slot or an address
VECTORS = re.compile(r"(?:ld|st)\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global [^;]*, 0x10,")


def of_groups(name, is_packed):
    """Launches over a prompt of 1024 tokens in one chunk of three, with 8 heads, and what merges two such blocks."""
    from kvcache_plugins.triton_kernels.attention import attend

    nbits, sides, head_dim, dtype, mask_dtype = GROUPS[name]

    def compressed(grouping, rank, outliers):
        (axis, group_size), chunk, length = grouping, (2, 8, 3), 1024
        of_channels = length // (group_size or length), head_dim
        grouped = of_channels if axis == "channel" else (length, head_dim // (group_size or head_dim))
        scale, entries = torch.empty(*chunk, *grouped, dtype=HALF), torch.empty(2, 1, 3, 4096)
        codes = torch.empty(*chunk, length, head_dim * nbits // 8, dtype=torch.uint8)
        factors = [torch.empty(*chunk, size, rank, dtype=HALF) if rank else None for size in (length, head_dim)]
        offsets = torch.empty(2, 1, 3, 129, dtype=torch.int32)
        stored = (entries.to(torch.int16), entries.to(HALF), offsets) if outliers else (None, None, None)
        return QuantizedChunks(codes, scale, scale, *factors, *stored, nbits, axis, None, head_dim)

    query = torch.empty(2, 8, 4, head_dim, dtype=dtype)
    mask = None if mask_dtype is None else torch.empty(2, 1, 1, 1024, dtype=mask_dtype)
    sizes = {"num_chunks": 1, "length": 1000, "mask": mask, "scale": 0.1, "num_sms": 132, "packed": is_packed}
    made = attend.prepare_groups(query, *(compressed(*side) for side in sides), **sizes)
    yield "attend", attend.attend_kernel, made.arguments, made.options
    yield "combine", *combining(made.result, query, mask)


def combining(partials, query, mask=None, num_tokens=None):
    """The launch that merges two blocks and attends to two exact parts."""
    from kvcache_plugins.triton_kernels.attention.combine import prepare_combination
    from kvcache_plugins.triton_kernels.attention.dense_part import DensePart

    states = torch.empty(2, 8, 100, query.shape[-1], dtype=query.dtype)
    part = DensePart(states, states, None if mask is None else mask[..., :100], num_tokens)
    made = prepare_combination([partials, partials], [part, part], query, 0.1)
    return made.kernel, made.arguments, {"num_warps": 4, **made.options}


def of_combination(name):
    from kvcache_plugins.triton_kernels.attention.partials import Partials

    head_dim, dtype = COMBINATIONS[name]
    maximum = torch.empty(2, 8, 4, 128)
    partials = Partials(torch.empty(2, 8, 4, 128, head_dim), maximum, maximum)
    num_tokens = torch.empty(1, dtype=torch.int64) if name.endswith("device") else None
    yield "combine", *combining(partials, torch.empty(2, 8, 128, head_dim, dtype=dtype), num_tokens=num_tokens)


def of_finish(name):
    from kvcache_plugins.triton_kernels.attention.finish import Finish, prepare_finish
    from kvcache_plugins.triton_kernels.attention.partials import Partials

    head_dim = FINISHES[name]
    maximum = torch.empty(2, 8, 4, 8)
    if name.startswith("finish-basis"):
        factors, vectors = torch.empty(8, head_dim), torch.empty(8, head_dim, head_dim, dtype=torch.int8)
        finish = Finish(vectors, factors, factors, mean=torch.empty(1, 8, head_dim, dtype=HALF))
    else:
        finish = Finish(torch.empty(1, head_dim, 128, dtype=torch.int8), scale=0.25)
    made = prepare_finish(Partials(torch.empty(2, 8, 4, 8, head_dim), maximum, maximum), finish, head_dim)
    yield "finish", made.kernel, made.arguments, made.options


def make_rows(head_dim, num_bytes, is_keys, is_calibrated, num_components=None):
    """Rows `[2, 8, 1000, row_size]` without data, and their layout."""
    from kvcache_plugins.triton_kernels.transform_coding.launches import CodedRows

    num_heads = 8
    rows = torch.empty(2, num_heads, 1000, 1 + num_bytes, dtype=torch.uint8)
    widths = torch.empty(1 if is_calibrated else 2, num_heads, -(-head_dim // 8), dtype=torch.uint8)
    by_channel = torch.empty(2, num_heads, head_dim, dtype=HALF)
    order, mean = (by_channel.byte(), by_channel) if is_keys else (None, None)
    deviation, basis = by_channel if is_keys else by_channel[..., :1].contiguous(), None
    if is_calibrated:
        order, mean, deviation = None, by_channel[:1], None
        factors, vectors = by_channel[0].float(), torch.empty(num_heads, head_dim, head_dim, dtype=torch.int8)
        basis = Basis(factors, vectors, factors, vectors[:, :num_components])
    described = (order, mean, deviation, widths, 1 + num_bytes, head_dim, is_keys, basis)
    num_refits = 5 if is_calibrated else 0
    return CodedRows(rows, RowFormat(*described, num_refits), torch.empty(9, 4))


def make_angles(head_dim):
    from kvcache_plugins.triton_kernels.transform_coding.launches import RotaryAngles

    return RotaryAngles(torch.empty(head_dim).int(), torch.empty(256, 2, head_dim), torch.empty(64, 2, head_dim))


def of_rows(name):
    from kvcache_plugins.triton_kernels.transform_coding.attend import prepare_rows

    head_dim, key_bytes, value_bytes, dtype, num_queries, mask_dtype, is_padded = ROWS[name]
    keys, values = (
        make_rows(head_dim, num_bytes, is_keys, name.startswith("c"), COMPONENTS.get(name))
        for num_bytes, is_keys in ((key_bytes, True), (value_bytes, False))
    )
    query = torch.empty(2, 8, num_queries, head_dim, dtype=dtype)
    num_tokens = torch.empty(1, dtype=torch.int64) if name.endswith("device") else None
    padding = torch.zeros(2, dtype=torch.int64) if is_padded else None
    mask = None if mask_dtype is None else torch.empty(2, 1, 1, 1000, dtype=mask_dtype)
    where = {"start": 4, "length": 1000, "num_tokens": num_tokens, "padding": padding, "mask": mask, "scale": 0.1}
    options = {"packed": True, "num_sms": 132, "only_scores": name.endswith("scores")}
    made = prepare_rows(query, keys, values, make_angles(head_dim), **where, **options)
    yield "attend", made.kernel, made.arguments, made.options


def of_row_step(name):
    """A step over older and recent rows and two exact parts, with lengths that are read on the device."""
    from kvcache_plugins.triton_kernels.attention.dense_part import DensePart
    from kvcache_plugins.triton_kernels.transform_coding.step import RowSegment, prepare_step

    head_dim, num_queries, dtype = ROW_STEPS[name]
    num_blocks = head_dim // 8
    keys, values = (
        make_rows(head_dim, size, is_keys, is_calibrated=False)
        for size, is_keys in ((19 * num_blocks // 8, True), (2 * num_blocks, False))
    )
    finer = [each._replace(layout=each.layout.with_more_bits(2)) for each in (keys, values)]
    finer = [each._replace(rows=torch.empty(2, 8, 136, each.layout.row_size, dtype=torch.uint8)) for each in finer]
    count = torch.empty(1, dtype=torch.int64)
    offset = torch.zeros(2, dtype=torch.int64)
    segments = [RowSegment(keys, values, 4, 1000, count), RowSegment(*finer, 2000, 136, count, offset)]
    states = torch.empty(2, 8, 100, head_dim, dtype=dtype)
    query = torch.empty(2, 8, num_queries, head_dim, dtype=dtype)
    exact = [DensePart(states, states, num_tokens=count)] * 2
    made = prepare_step(query, segments, make_angles(head_dim), exact, scale=0.1, packed=True, num_sms=132)
    yield "attend", made.kernel, made.arguments, made.options


def of_coding(name):
    from kvcache_plugins.triton_kernels.transform_coding.attend import block_channels
    from kvcache_plugins.triton_kernels.transform_coding.code_rows import prepare_coding
    from kvcache_plugins.triton_kernels.transform_coding.launches import Codebook, PushState
    from kvcache_plugins.triton_kernels.transform_coding.push import prepare_push

    head_dim, num_bytes, dtype = CODING[name]
    is_keys, is_calibrated = "keys" in name, "calibrated" in name
    states = torch.empty(2, 1000, 8, head_dim, dtype=dtype).transpose(1, 2)
    book = Codebook(torch.empty(9, 4), torch.empty(9, 577, dtype=torch.uint8), torch.empty(9, 577))
    sides = [make_rows(head_dim, num_bytes, is_keys, is_calibrated) for is_keys in (True, False)]
    padding, size = torch.zeros(2, dtype=torch.int64), (head_dim, block_channels(head_dim))
    signs = None if is_keys or is_calibrated else torch.empty(size, dtype=HALF if dtype == SINGLE else dtype)
    if name.startswith("push"):
        older = tuple(side.layout for side in sides)
        finer = tuple(each.with_more_bits(2) for each in older)
        recent = tuple(torch.empty(2, 8, 136, each.row_size, dtype=torch.uint8) for each in finer)
        tail = (torch.empty(2, 8, 5, head_dim, dtype=dtype),) * 2
        counters, offset = torch.zeros(2, 2, 8, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        rows = tuple(side.rows for side in sides)
        state = PushState(tail, rows, recent, counters, offset, older, finer, padding, 1, 128, 96, 2000, 2000)
        made = prepare_push(state, (book, book), signs, make_angles(head_dim))
    else:
        where = {"angles": make_angles(head_dim), "start": 4, "padding": padding} if is_keys else {}
        made = prepare_coding(states, sides[not is_keys].layout, book, signs, **where)
    yield "code", made.kernel, made.arguments, made.options


def of_group_push(name):
    from kvcache_plugins.codecs.low_rank import starting_matrix
    from kvcache_plugins.gear.config import GEARConfig
    from kvcache_plugins.triton_kernels.group_packing.launches import GroupPushState
    from kvcache_plugins.triton_kernels.group_packing.push import prepare_group_push

    options, head_dim, num_heads, dtype = GROUP_PUSHES[name]
    codec = GEARConfig(**{"decode_rank": min(2, options.get("rank", 4)), **options}).codec(head_dim, head_dim)
    chunks, starts = [], []
    for side in (codec.keys, codec.values):
        layout = side.layout(2, num_heads, 3, 64, side.sizes(num_heads, 64))
        chunks.append(side.wrap({key: torch.empty(size, dtype=kind) for key, (size, kind) in layout.items()}))
        starts.append(starting_matrix(head_dim, side.decode_rank, torch.device("cpu")) if side.decode_rank else None)
    state = GroupPushState(
        tail=(torch.empty(2, num_heads, 64, head_dim, dtype=dtype),) * 2,
        chunks=tuple(chunks),
        counters=torch.zeros(2, 2, num_heads, 4, dtype=torch.int64),
        starts=tuple(starts),
        num_iterations=3,
        spreads_errors=(False, True),
        signs=torch.empty(head_dim, head_dim, dtype=dtype) if codec.values.is_rotated else None,
    )
    for made in prepare_group_push(state):
        yield made.kernel.fn.__name__.removesuffix("_kernel"), made.kernel, made.arguments, made.options


def of_call(name):
    """Calls launchers of InfiniGen's rows and scores, recording their launch instead of running it."""
    from triton.runtime.jit import JITFunction

    from kvcache_plugins.triton_kernels.gather import gather_rows, write_rows
    from kvcache_plugins.triton_kernels.launch import OPTIONS
    from kvcache_plugins.triton_kernels.scores import score_codes

    launches, run = [], JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **arguments: launches.append((self, arguments))
    try:
        if name in MOVES:
            row_dim, dtype, is_counted, _ = MOVES[name]
            rows = torch.empty(1, 8, 6001, row_dim, dtype=dtype)
            slots, addresses = torch.zeros(rows.shape[:3]).long(), torch.zeros(32).long()
            count = torch.zeros(1, 8).long() if is_counted else None
            (gather_rows if name.startswith("gather") else write_rows)(addresses, slots, count, rows, 1024)
        else:
            head_dim, groups, nbits = SCORES[name]
            codes = torch.zeros(1, 8, 40000, -(-head_dim * nbits // 8), dtype=torch.uint8)[:, :, :32001]
            scale = torch.zeros(1, 8, 40000, dtype=HALF)[:, :, :32001]
            score_codes(codes, scale, torch.zeros(1, 8, groups, head_dim), nbits)
    finally:
        JITFunction.run = run
    ((kernel, arguments),) = launches
    yield "call", kernel, arguments, {name: arguments.pop(name) for name in OPTIONS}


def of_step(name):
    """Launch a step over 16000 tokens of a pool that chooses at most 3200."""
    from kvcache_plugins.triton_kernels.infinigen import attend, choose, push, queries
    from kvcache_plugins.triton_kernels.scores import prepare_column_scores
    from kvcache_plugins.triton_kernels.transform_coding.decode_rows import prepare_decoding

    head_dim, groups, dtype = STEPS[name]
    shape = 2, 8
    states = torch.empty(*shape, 64, head_dim, dtype=dtype)
    query = torch.empty(2, 8 * groups, 1, head_dim, dtype=dtype)
    slots, count = torch.empty(*shape, 3200, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
    rows = torch.empty(*shape, 3200, 2 * head_dim, dtype=dtype)
    scores = torch.empty(*shape, groups, 16000)
    mask, padding = torch.empty(2, 16020, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    options = {"ratio": torch.empty(1, dtype=torch.float64), "min_weight": 0.5, "wanted": count, "num_first": 4}
    options |= {
        "num_newest": 32,
        "scale": 0.1,
        "weights": scores[:, :, 0].contiguous(),
        "slots": slots,
        "count": count,
    }
    columns, rotation = torch.empty(*shape, 16000, 38, dtype=dtype), torch.empty(*shape, head_dim, 38, dtype=dtype)
    grouped = query.view(*shape, groups, head_dim)
    new = states[:, :, :1].contiguous()
    hidden, weight = torch.empty(2, 1, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    angles = torch.empty(2, 1, head_dim, dtype=dtype)
    sides = [make_rows(head_dim, head_dim // 2, is_keys, is_calibrated=False) for is_keys in (True, False)]
    sides[1] = sides[1]._replace(rows=torch.empty(*shape, 3200, sides[1].layout.row_size, dtype=torch.uint8))
    size = head_dim, triton_block(head_dim)
    exact = (states[:, :, :4].contiguous(),) * 2
    fetched = torch.empty((), dtype=torch.int64)
    launches = {
        "columns": prepare_column_scores(grouped, columns, 16000, rotation),
        "count": choose.prepare_count(scores, mask, padding, 4.0, count),
        "choose": choose.prepare_choice(scores, query, states, 40, 16041, 3200, mask, padding, **options),
        "push": push.prepare_exact_push((new, new), (states, states)),
        "norm": queries.prepare_rms_norm(hidden, weight, 1e-6, 0.0),
        "rotate": queries.prepare_rotation(query.view(2, 1, -1), angles, angles, head_dim),
        "decode": prepare_decoding(
            *sides, slots, count, slots[:, :, :head_dim].short().contiguous(), torch.empty(size, dtype=HALF),
            make_angles(head_dim), exact, padding, 512,
        ),
    }  # fmt: skip
    attention = (query, rows, slots, count, (states, states), 40, 16000, mask, 0.1, fetched, 132)
    launches["attend"], launches["merge"] = attend.prepare_attention(*attention)
    for part, made in launches.items():
        yield part, made.kernel, made.arguments, {"num_warps": 4, **made.options}


def triton_block(head_dim):
    from kvcache_plugins.triton_kernels.transform_coding.attend import block_channels

    return block_channels(head_dim)


def launches_of(name, is_packed):
    """Prepares the launches of a variant: names, kernels, arguments and options."""
    if name in GROUPS:
        return of_groups(name, is_packed)
    kinds = {
        of_combination: COMBINATIONS,
        of_finish: FINISHES,
        of_rows: ROWS,
        of_row_step: ROW_STEPS,
        of_coding: CODING,
        of_group_push: GROUP_PUSHES,
        of_step: STEPS,
    }
    return next((make for make, variants in kinds.items() if name in variants), of_call)(name)


def main(words):
    """Write a line of JSON for each kernel, of several targets in turn; AMD's must be the last."""
    for word in words:
        if word not in VARIANTS:
            names = itertools.takewhile(VARIANTS.__contains__, words[words.index(word) + 1 :])
            compile_all(word, list(names) or VARIANTS)


def compile_all(target, names):
    import triton.language as tl

    from kvcache_plugins.triton_kernels.transform_coding.attend import shared_bytes

    is_amd = target.startswith("gfx")
    if is_amd:
        # The version that a build of PyTorch for these GPUs reports
        torch.version.hip = "7.0"
    for name in names:
        for part, kernel, arguments, options in launches_of(name, not is_amd):
            compiled = compile_for(kernel, arguments, target if is_amd else int(target), **options)
            line: dict[str, Any] = {"target": target, "name": name, "part": part, "shared": compiled.metadata.shared}
            if not is_amd:
                line |= {**resources(compiled), "has_vectors": bool(VECTORS.search(compiled.asm["ptx"]))}
            if name in ROWS and arguments["BASIS"]:
                sizes = (arguments[size] for size in ("KEY_DIM", "KEY_CODED", "VALUE_CODED"))
                line["bound"] = shared_bytes(*sizes, is_float32=arguments["DTYPE"] == tl.float32)
            if name in COUNTS and not is_amd:
                listing = Listing(run_tool("nvdisasm", "-c", compiled))
                count = sum(listing.count(listing.shortest_loop()).values())
                numbers = arguments["BLOCK_T"] * 2 * ROWS[name][0]
                line["instructions"] = round(count * options["num_warps"] / numbers, 3)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variants",
    [DAILY, *(pytest.param({target: names}, marks=pytest.mark.long) for target, names in LONG.items())],
    ids=["daily", *LONG],
)
def test_kernels_stay_in_registers_and_shared_memory(variants, run_compiling):
    words = [word for target, names in variants.items() for word in (target, *names)]
    lines = [json.loads(line) for line in run_compiling(*words).splitlines()]
    asked = [(target, name) for target, names in variants.items() for name in names]
    assert list(dict.fromkeys((line["target"], line["name"]) for line in lines)) == asked
    for line in lines:
        target, name = line["target"], line["name"]
        is_amd = target.startswith("gfx")
        assert line["shared"] <= line.get("bound", line["shared"]), line
        # Wider heads are only to compile
        if name not in ("gear-2bit-d256", "group-push-gear-2bit-d256", *BASES):
            is_widest = name in COMBINATIONS and target == "90"
            most = MAX_SHARED_H200 if is_widest else MAX_SHARED_AMD if is_amd else MAX_SHARED
            assert line["shared"] <= most, line
            spilled = SPILLED.get((line["part"], name), MAX_SPILLED if name in MAY_SPILL else 0)
            assert line.get("spilled", 0) <= SPILLED.get((target, name), spilled), line
        if name in COUNTS and target == "90":
            assert abs(line["instructions"] / COUNTS[name] - 1) < MARGIN, line
        if not is_amd and name in (*MOVES, *SCORES):
            assert line["has_vectors"] == (name in SCORES or MOVES[name][3]), line


if __name__ == "__main__":
    main(sys.argv[1:])
