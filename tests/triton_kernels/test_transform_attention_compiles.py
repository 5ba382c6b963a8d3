"""Attention over transform-coded rows compiles without a GPU, spills little, and stays as short as it was counted.

Compiled in a process of its own, because Triton decides when it is imported whether it interprets. Running this file
(`python tests/triton_kernels/test_transform_attention_compiles.py 90`) prints the table.
"""

import json
import sys

import pytest
import torch

from kvcache_plugins.eval.machine_code.compilation import compile_for, disassemble, resources
from kvcache_plugins.eval.machine_code.listing import Listing


BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
# Head dim, bytes of a key's and of a value's codes, query's dtype, rows, mask's dtype, padding, and whether codes are
# those of a trellis
VARIANTS = {
    "t16-d64": (64, 19, 16, BRAIN, 3, None, False, False),
    "t16-d128": (128, 38, 32, BRAIN, 4, None, False, False),
    "t30-d128-rows16": (128, 80, 64, HALF, 16, BRAIN, True, False),
    "t16-d256": (256, 76, 64, BRAIN, 4, torch.bool, False, False),
    "t16-d128-float32": (128, 38, 32, SINGLE, 4, None, False, False),
    "t16-trellis-d64": (64, 19, 16, BRAIN, 3, None, False, True),
    # In calibrated bases
    "c16-d64": (64, 18, 18, BRAIN, 3, None, False, False),
    "c16-d128": (128, 36, 36, BRAIN, 4, None, False, False),
    "c16-trellis-d64": (64, 18, 18, BRAIN, 3, None, False, True),
}
# One GPU, without and with a calibration
NAMES = {90: ["t16-d128", "c16-trellis-d64"]}
OTHER_NAMES = {
    80: ["t30-d128-rows16", "c16-d64", "t16-d256"],
    90: ["t16-d64", "t16-d128-float32", "t16-trellis-d64", "c16-d64", "c16-d128"],
}
# With lengths that are read on the device
DEVICE = "-device"
DEVICE_NAMES = {80: ["t16-d64-device"], 86: ["t16-d64-device", "c16-d64-device"], 90: ["t16-d128-device"]}
# Warp instructions a cached number of the loop over whole tiles, and how much more is taken for the same
COUNTS = {"t16-d64": 0.303, "t16-d128": 0.281, "t16-trellis-d64": 0.348, "c16-d64": 0.340, "c16-d128": 0.436}
# Bytes that a thread may spill, by capability: bases of 128 channels do not fit into registers, and values that are
# turned back in the kernel want a few more in float32
SPILLED = {(80, "c16-d64"): 24, (86, "c16-d64-device"): 56, (90, "c16-d128"): 80, (90, "t16-d128-float32"): 16}
MARGIN = 0.05
# The least that any GPU since sm_80 has for a program, in bytes
MAX_SHARED = 99 * 1024


def launch(name):
    """What would be launched on a GPU."""
    num_tokens = torch.empty(1, dtype=torch.int64) if name.endswith(DEVICE) else None
    name = name.removesuffix(DEVICE)
    from kvcache_plugins.codecs.basis import Basis
    from kvcache_plugins.codecs.rows import RowTable
    from kvcache_plugins.triton_kernels.transform_coding.attend import prepare_rows
    from kvcache_plugins.triton_kernels.transform_coding.launches import CodedRows, RotaryAngles

    head_dim, key_bytes, value_bytes, dtype, num_rows, mask_dtype, is_padded, is_trellis = VARIANTS[name]
    batch_size, num_heads, length = 2, 8, 1000
    quantizer = "trellis" if is_trellis else "lloyd-max"

    def side(num_bytes, is_keys):
        rows = torch.empty(batch_size, num_heads, length, 1 + num_bytes, dtype=torch.uint8)
        by_channel = torch.empty(batch_size, num_heads, head_dim, dtype=HALF)
        deviation = by_channel if is_keys else by_channel[..., :1]
        order, mean = (by_channel.to(torch.uint8), by_channel) if is_keys else (None, None)
        sizes = 1 + num_bytes, head_dim, is_keys
        table = RowTable(order, mean, deviation, rows[:, :, 0], *sizes, quantizer=quantizer)
        return CodedRows(rows, table, torch.empty(9, 6))

    def basis_side(num_bytes, is_keys):
        rows = torch.empty(batch_size, num_heads, length, 1 + num_bytes, dtype=torch.uint8)
        by_channel = torch.empty(num_heads, head_dim)
        basis = torch.empty(num_heads, head_dim, head_dim, dtype=torch.int8)
        own = {"basis": Basis(by_channel, basis, by_channel, basis), "quantizer": quantizer}
        sizes = 1 + num_bytes, head_dim, is_keys
        table = RowTable(None, by_channel.half()[None], None, rows[:1, :, 0].contiguous(), *sizes, **own)
        return CodedRows(rows, table, torch.empty(9, 6))

    angles = RotaryAngles(torch.empty(head_dim).int(), torch.empty(256, 2, head_dim), torch.empty(64, 2, head_dim))
    make_side = basis_side if name.startswith("c") else side
    return prepare_rows(
        torch.empty(batch_size, num_heads, num_rows, head_dim, dtype=dtype),
        make_side(key_bytes, True),
        make_side(value_bytes, False),
        angles,
        start=4,
        length=length,
        num_tokens=num_tokens,
        padding=torch.zeros(batch_size, dtype=torch.int64) if is_padded else None,
        mask=None if mask_dtype is None else torch.empty(batch_size, 1, 1, length, dtype=mask_dtype),
        scale=0.1,
        packed=True,
        num_sms=132,
    )


def main(capability, names):
    """Writes a line of JSON for each variant."""
    for name in names or VARIANTS:
        made = launch(name)
        compiled = compile_for(made.kernel, made.arguments, capability, **made.options)
        line = {"name": name, "capability": capability, **resources(compiled)}
        variant = name.removesuffix(DEVICE)
        if variant in COUNTS:
            listing = Listing(disassemble(compiled))
            count = sum(listing.count(listing.shortest_loop()).values())
            numbers = made.arguments["BLOCK_T"] * 2 * VARIANTS[variant][0]
            line["instructions_per_number"] = round(count * made.options["num_warps"] / numbers, 3)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.parametrize("capability", NAMES)
def test_attention_over_rows_stays_in_registers(capability, run_compiling):
    check(capability, NAMES[capability], run_compiling)


@pytest.mark.long
@pytest.mark.parametrize("capability", OTHER_NAMES)
def test_other_kernels_stay_in_registers(capability, run_compiling):
    check(capability, OTHER_NAMES[capability], run_compiling)


@pytest.mark.long
@pytest.mark.parametrize("capability", DEVICE_NAMES)
def test_it_compiles_with_lengths_on_the_device(capability, run_compiling):
    check(capability, DEVICE_NAMES[capability], run_compiling)


def check(capability, names, run_compiling):
    lines = [json.loads(line) for line in run_compiling(str(capability), *names).splitlines()]
    assert [line["name"] for line in lines] == names
    for line in lines:
        name = line["name"].removesuffix(DEVICE)
        assert line["spilled"] <= SPILLED.get((capability, line["name"]), 0), line
        assert line["shared"] < MAX_SHARED, line
        if name in COUNTS and capability == 90:
            assert abs(line["instructions_per_number"] / COUNTS[name] - 1) < MARGIN, line


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
