"""The attention kernels compile for AMD's GPUs too, which take plain PyTorch until one has run them.

In a process of its own, as Triton decides when it is imported whether it interprets. `python
tests/triton_kernels/test_amd_compiles.py gfx942` prints what was compiled.
"""

import json
import sys

import pytest
import torch

from kvcache_plugins.eval.machine_code import compile_for


# What a program may have of local data share
MAX_SHARED = 65536


def tokens_of_2_bits(axis):
    """Empty storage of a prompt of 1024 tokens in groups of 64, with 8 heads of 128."""
    from kvcache_plugins.codecs.groups import CompressedStates
    from kvcache_plugins.codecs.quantization import Grouping

    grouped = (16, 128) if axis == "channel" else (1024, 2)
    scale = torch.empty(1, 8, 1, *grouped, dtype=torch.float16)
    codes = torch.empty(1, 8, 1, 1024, 32, dtype=torch.uint8)
    return CompressedStates(codes, scale, scale, None, None, None, None, None, 2, Grouping(axis, 64), 128)


def main(architecture):
    """Writes a line of JSON for each kernel."""
    from kvcache_plugins.triton_kernels.attention.attend import attend_kernel, prepare
    from kvcache_plugins.triton_kernels.attention.combine import combine_kernel, prepare_combination
    from kvcache_plugins.triton_kernels.attention.dense_part import DensePart

    # What a build of PyTorch for these GPUs says of itself
    torch.version.hip = "7.0"
    query = torch.empty(1, 8, 4, 128, dtype=torch.bfloat16)
    sides = tokens_of_2_bits("channel"), tokens_of_2_bits("token")
    sizes = {
        "num_chunks": 1,
        "length": 1000,
        "mask": None,
        "scale": 0.1,
        "num_sms": 104,
    }
    attending = prepare(query, *sides, packed=False, **sizes)
    states = torch.empty(1, 8, 100, 128, dtype=torch.bfloat16)
    combining = prepare_combination([attending.result], [DensePart(states, states)], query, 0.1)
    for name, kernel, launch in (("attend", attend_kernel, attending), ("combine", combine_kernel, combining)):
        compiled = compile_for(kernel, launch.arguments, architecture, **launch.options)
        row = {"kernel": name, "bytes": len(compiled.asm["hsaco"]), "shared": compiled.metadata.shared}
        sys.stdout.write(json.dumps(row) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gfx942", pytest.param("gfx90a", marks=pytest.mark.long)])
def test_kernels_compile(architecture, run_compiling):
    rows = [json.loads(line) for line in run_compiling(architecture).splitlines()]
    assert [row["kernel"] for row in rows] == ["attend", "combine"]
    assert all(row["bytes"] > 0 and row["shared"] <= MAX_SHARED for row in rows), rows


if __name__ == "__main__":
    main(sys.argv[1])
