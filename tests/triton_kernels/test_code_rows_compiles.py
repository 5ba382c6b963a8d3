"""The kernels that code rows compile without a GPU, for NVIDIA's since sm_80 and for AMD's, and spill nothing.

Compiled in a process of its own, because Triton decides when it is imported whether it interprets. Running this file
(`python tests/triton_kernels/test_code_rows_compiles.py 90`) prints the table.
"""

import json
import sys

import pytest
import torch

from kvcache_plugins.eval.machine_code.compilation import compile_for, disassemble, resources
from kvcache_plugins.eval.machine_code.listing import Listing


BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
# Head dim, bytes of codes, dtype of the states, whether they are keys, and whether bases are calibrated
VARIANTS = {
    "keys-d64": (64, 32, BRAIN, True, False),
    "values-d64": (64, 26, BRAIN, False, False),
    "keys-d80": (80, 40, HALF, True, False),
    "keys-d128": (128, 64, BRAIN, True, False),
    "values-d128": (128, 52, BRAIN, False, False),
    "values-d128-float32": (128, 52, SINGLE, False, False),
    "keys-d256": (256, 128, BRAIN, True, False),
    "values-d256": (256, 104, BRAIN, False, False),
    "calibrated-keys-d64": (64, 18, BRAIN, True, True),
    "calibrated-keys-d128": (128, 36, BRAIN, True, True),
    "calibrated-values-d128-float32": (128, 36, SINGLE, False, True),
    "calibrated-keys-d256": (256, 72, BRAIN, True, True),
}
_FEW = ["keys-d128", "values-d128", "values-d256", "calibrated-keys-d128"]
NAMES = {
    "90": ["keys-d128", "values-d256"],
    "80": _FEW,
    "86": _FEW,
    "120": _FEW,
    "gfx942": _FEW,
    "90, all": list(VARIANTS),
}
# The least that any GPU since sm_80 has for a program, in bytes, and AMD's
MAX_SHARED, MAX_SHARED_AMD = 99 * 1024, 65536


def launch(name):
    """What would be launched on a GPU."""
    from kvcache_plugins.codecs.basis import Basis
    from kvcache_plugins.codecs.rows import RowTable
    from kvcache_plugins.triton_kernels.transform_coding.attend import block_channels
    from kvcache_plugins.triton_kernels.transform_coding.code_rows import prepare_coding
    from kvcache_plugins.triton_kernels.transform_coding.launches import Codebook, RotaryAngles

    head_dim, num_bytes, dtype, is_keys, is_calibrated = VARIANTS[name]
    batch_size, num_heads, length, num_blocks = 2, 8, 1000, -(-head_dim // 8)
    states = torch.empty(batch_size, length, num_heads, head_dim, dtype=dtype).transpose(1, 2)
    book = Codebook(torch.empty(9, 6), torch.empty(9, 577, dtype=torch.uint8), torch.empty(9, 577))
    angles = RotaryAngles(torch.empty(head_dim).int(), torch.empty(256, 2, head_dim), torch.empty(64, 2, head_dim))
    where = {"start": 4, "padding": torch.zeros(batch_size, dtype=torch.int64)} if is_keys else {}
    if is_calibrated:
        by_channel = torch.empty(num_heads, head_dim)
        basis = torch.empty(num_heads, head_dim, head_dim, dtype=torch.int8)
        own = {"basis": Basis(by_channel, basis, by_channel, basis), "num_refits": 5 if is_keys else 0}
        widths = torch.empty(1, num_heads, num_blocks).byte()
        table = RowTable(None, by_channel.half()[None], None, widths, 1 + num_bytes, head_dim, is_keys, **own)
        return prepare_coding(states, table, book, None, angles if is_keys else None, **where)
    by_channel = torch.empty(batch_size, num_heads, head_dim, dtype=HALF)
    order, mean = (by_channel.byte(), by_channel) if is_keys else (None, None)
    deviation = by_channel if is_keys else by_channel[..., :1].contiguous()
    sign_dtype = HALF if dtype == SINGLE else dtype
    signs = None if is_keys else torch.empty(head_dim, block_channels(head_dim), dtype=sign_dtype)
    widths = torch.empty(batch_size, num_heads, num_blocks).byte()
    table = RowTable(order, mean, deviation, widths, 1 + num_bytes, head_dim, is_keys)
    return prepare_coding(states, table, book, signs, angles if is_keys else None, **where)


def main(target, names):
    """Writes a line of JSON for each variant."""
    is_amd = target.startswith("gfx")
    for name in names or VARIANTS:
        made = launch(name)
        compiled = compile_for(made.kernel, made.arguments, target if is_amd else int(target), **made.options)
        line = {"name": name, "target": target, "shared": compiled.metadata.shared}
        if not is_amd:
            count = len(Listing(disassemble(compiled)).operations) * made.options["num_warps"]
            per_number = round(count / (made.arguments["BLOCK_T"] * VARIANTS[name][0]), 2)
            line |= {**resources(compiled), "instructions_per_number": per_number}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["90", *(pytest.param(name, marks=pytest.mark.long) for name in list(NAMES)[1:])])
def test_coding_stays_in_registers(target, run_compiling):
    lines = [json.loads(line) for line in run_compiling(target.split(",")[0], *NAMES[target]).splitlines()]
    assert [line["name"] for line in lines] == NAMES[target]
    for line in lines:
        assert line["shared"] <= (MAX_SHARED_AMD if target.startswith("gfx") else MAX_SHARED), line
        assert line.get("spilled", 0) == 0, line


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
