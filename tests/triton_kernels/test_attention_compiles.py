"""The attention kernels compile to machine code without a GPU, and keep what they work on in registers.

Compiled in a process of its own, because Triton decides when it is imported whether it interprets. Running this file
(`python tests/triton_kernels/test_attention_compiles.py 90`) prints the table.
"""

import json
import sys

import pytest
import torch

from kvcache_plugins.eval.machine_code import compile_for, resources


BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
CHANNEL, TOKEN = ("channel", None), ("token", None)
# (nbits, (axis, group size), rank, outliers) of keys and of values, head dim, query's dtype, rows, mask
GEAR_KEYS = (2, CHANNEL, 4, True)
GEAR_VALUES = (2, TOKEN, 4, True)
VARIANTS = {
    "kcvt-2bit-d64": ((2, CHANNEL, 0, False), (2, TOKEN, 0, False), 64, HALF, 4, None),
    "kcvt-2bit-d128": ((2, CHANNEL, 0, False), (2, TOKEN, 0, False), 128, BRAIN, 4, None),
    "kcvt-3bit-d128": ((3, CHANNEL, 0, False), (3, TOKEN, 0, False), 128, BRAIN, 4, None),
    "kcvt-4bit-d128": ((4, CHANNEL, 0, False), (4, TOKEN, 0, False), 128, HALF, 4, BRAIN),
    "kcvt-8bit-d128": ((8, CHANNEL, 0, False), (8, TOKEN, 0, False), 128, BRAIN, 4, None),
    "kcvt-4bit-d128-float32": ((4, CHANNEL, 0, False), (4, TOKEN, 0, False), 128, SINGLE, 4, None),
    "kivi-2bit-d128": ((2, ("channel", 32), 0, False), (2, ("token", 32), 0, False), 128, BRAIN, 4, None),
    "token-token-4bit-d128": ((4, TOKEN, 0, False), (4, TOKEN, 0, False), 128, BRAIN, 4, torch.bool),
    "channel-channel-2bit-d128": ((2, CHANNEL, 0, False), (2, CHANNEL, 0, False), 128, BRAIN, 4, None),
    "gear-l-2bit-d128": ((2, CHANNEL, 4, False), (2, TOKEN, 4, False), 128, BRAIN, 4, None),
    "gear-2bit-d64": (GEAR_KEYS, GEAR_VALUES, 64, HALF, 4, torch.bool),
    "gear-2bit-d128": (GEAR_KEYS, GEAR_VALUES, 128, BRAIN, 4, BRAIN),
    "gear-3bit-d128": ((3, CHANNEL, 4, True), (3, TOKEN, 4, True), 128, BRAIN, 4, None),
    "gear-4bit-d128-rows32": ((4, CHANNEL, 4, True), (4, TOKEN, 4, True), 128, HALF, 32, None),
    "gear-2bit-d256": (GEAR_KEYS, GEAR_VALUES, 256, BRAIN, 4, None),
    # A kernel has both 2 and 4 in it, or one other rank
    **{
        f"rank-{rank}": ((2, CHANNEL, rank, False), (2, TOKEN, rank, False), 64, HALF, 4, None)
        for rank in (1, 2, 3, 8)
    },
}
# One GPU, without and with low rank
NAMES = {90: ["kivi-2bit-d128", "gear-l-2bit-d128"]}
OTHER_NAMES = {
    80: ["kcvt-2bit-d64", "kivi-2bit-d128", "gear-2bit-d64", "gear-2bit-d128", "rank-1", "rank-2", "rank-3", "rank-8"],
    86: ["kivi-2bit-d128"],
    120: ["kivi-2bit-d128"],
    90: [
        *("kcvt-2bit-d128", "kcvt-8bit-d128", "kcvt-4bit-d128-float32", "token-token-4bit-d128"),
        *("gear-3bit-d128", "gear-2bit-d256", "rank-1", "rank-2", "rank-3", "rank-8"),
    ],
}
# Bytes a thread. Where 168 or 128 registers let one more program run at once, the assembler itself puts a few into
# local memory rather than use another register
MAX_SPILLED = 32
# What spills more: kernels with low rank and outliers both, mostly what is used once a chunk, and those of two parts.
# These must not get worse. That ranks and padding are data, so that one kernel serves all prompts, costs registers too
KNOWN_SPILLS = {
    "gear-2bit-d64": 72,
    "gear-2bit-d128": 176,
    "gear-3bit-d128": 168,
    "gear-l-2bit-d128": 64,
    "kcvt-4bit-d128-float32": 64,
}
# Shared memory that a program may ask for, in bytes: RTX 30 and 40, H200; A100 compiles as the first and has 163 KB
MAX_SHARED = {86: 101376, 90: 232448}
# Launches of `combine` (head dim, query's dtype, rows) that ask for most, and the largest whose loads run ahead
COMBINATIONS = {
    86: [(128, SINGLE, 128), (256, BRAIN, 128), (256, SINGLE, 128)],
    90: [(256, BRAIN, 128), (256, SINGLE, 128)],
}


def compressed(side, head_dim):
    """Empty storage of a prompt of 1024 tokens in one chunk, with 8 heads."""
    from kvcache_plugins.codecs.groups import CompressedStates
    from kvcache_plugins.codecs.quantization import Grouping

    nbits, (axis, group_size), rank, outliers = side
    chunk, length = (2, 8, 3), 1024
    grouped = (
        (length // (group_size or length), head_dim)
        if axis == "channel"
        else (length, head_dim // (group_size or head_dim))
    )
    scale = torch.empty(*chunk, *grouped, dtype=HALF)
    entries = torch.empty(2, 1, 3, 4096)
    return CompressedStates(
        codes=torch.empty(*chunk, length, head_dim * nbits // 8, dtype=torch.uint8),
        scale=scale,
        zero=scale,
        low_rank_a=torch.empty(*chunk, length, rank, dtype=HALF) if rank else None,
        low_rank_b=torch.empty(*chunk, head_dim, rank, dtype=HALF) if rank else None,
        outlier_indices=entries.to(torch.int16) if outliers else None,
        outlier_values=entries.to(HALF) if outliers else None,
        outlier_offsets=torch.empty(2, 1, 3, 129, dtype=torch.int32) if outliers else None,
        nbits=nbits,
        grouping=Grouping(axis, None),
        head_dim=head_dim,
    )


def compile_variant(name, capability):
    """What each kernel of a variant uses on a GPU of that compute capability."""
    from kvcache_plugins.triton_kernels.attention import attend

    keys, values, head_dim, dtype, num_rows, mask_dtype = VARIANTS[name]
    query = torch.empty(2, 8, num_rows, head_dim, dtype=dtype)
    mask = None if mask_dtype is None else torch.empty(2, 1, 1, 1024, dtype=mask_dtype)
    launch = attend.prepare(
        query,
        compressed(keys, head_dim),
        compressed(values, head_dim),
        num_chunks=1,
        length=1000,
        mask=mask,
        scale=0.1,
        num_sms=132,
        packed=True,
    )
    compiled = compile_for(attend.attend_kernel, launch.arguments, capability, **launch.options)
    return {"attend": resources(compiled), "combine": compile_combination(launch.result, query, mask, capability)}


def compile_combination(partials, query, mask, capability):
    """What merging two blocks and attending to two exact parts uses."""
    from kvcache_plugins.triton_kernels.attention.combine import prepare_combination
    from kvcache_plugins.triton_kernels.attention.dense_part import DensePart

    states = torch.empty(2, 8, 100, query.shape[-1], dtype=query.dtype)
    part = DensePart(states, states, None if mask is None else mask[..., :100])
    launch = prepare_combination([partials, partials], [part, part], query, 0.1)
    return resources(compile_for(launch.kernel, launch.arguments, capability, num_warps=4, **launch.options))


def compile_combinations(capability):
    """Writes a line of JSON for each of `COMBINATIONS`."""
    from kvcache_plugins.triton_kernels.attention.partials import Partials

    for head_dim, dtype, num_rows in COMBINATIONS[capability]:
        query = torch.empty(2, 8, num_rows, head_dim, dtype=dtype)
        maximum = torch.empty(2, 8, 4, num_rows)
        partials = Partials(torch.empty(2, 8, 4, num_rows, head_dim), maximum, maximum)
        used = compile_combination(partials, query, None, capability)
        sys.stdout.write(json.dumps({"head_dim": head_dim, "dtype": str(dtype), "rows": num_rows, **used}) + "\n")


def main(capability, names):
    """Writes a line of JSON for each variant."""
    if names == ["combinations"]:
        compile_combinations(capability)
        return
    for name in names or VARIANTS:
        sys.stdout.write(
            json.dumps({"name": name, "capability": capability, **compile_variant(name, capability)}) + "\n"
        )
        sys.stdout.flush()


@pytest.fixture
def run_main(run_compiling):
    """The lines that `main` writes, in a process without Triton's interpreter."""
    return lambda capability, names: [json.loads(line) for line in run_compiling(str(capability), *names).splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", NAMES)
def test_decode_kernels_stay_in_registers(capability, run_main):
    check(run_main(capability, NAMES[capability]), NAMES[capability])


@pytest.mark.long
@pytest.mark.parametrize("capability", OTHER_NAMES)
def test_other_kernels_stay_in_registers(capability, run_main):
    check(run_main(capability, OTHER_NAMES[capability]), OTHER_NAMES[capability])


def check(lines, names):
    assert [line["name"] for line in lines] == names
    for line in lines:
        name = line["name"]
        _, _, head_dim, _, num_rows, _ = VARIANTS[name]
        if head_dim <= 128 and num_rows <= 16:
            assert line["attend"]["spilled"] <= KNOWN_SPILLS.get(name, MAX_SPILLED), line
            assert line["attend"]["shared"] <= MAX_SHARED[86], line
            assert line["combine"]["spilled"] <= MAX_SPILLED, line


@pytest.mark.long
@pytest.mark.parametrize("capability", [86, 90])
def test_combine_fits_into_shared_memory(capability, run_main):
    lines = run_main(capability, ["combinations"])
    assert len(lines) == len(COMBINATIONS[capability])
    assert [line for line in lines if line["shared"] > MAX_SHARED[capability]] == []
    assert [line for line in lines if line["spilled"] > MAX_SPILLED] == []


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
