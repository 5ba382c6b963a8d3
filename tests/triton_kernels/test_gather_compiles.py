"""The kernels that move rows and score codes compile for sm_80 and sm_90, without spills, and move 16 bytes at once.

The launchers are called, what they launch is compiled instead of run, in a process of its own without Triton's
interpreter. Run as a script, with 90 behind it, this file prints the table.
"""

import re
import sys
from collections.abc import Callable

import pytest


# Loads and stores of more than the eight bytes of a slot or an address
VECTORS = re.compile(r"(?:ld|st)\.global\S*\.v4\.b32")


def calls() -> dict[str, tuple[bool, Callable[[], object]]]:
    """Calls of the launchers, and whether rows lie so that 16 bytes are moved at once."""
    import torch

    from kvcache_plugins.triton_kernels.gather import gather_rows, write_rows
    from kvcache_plugins.triton_kernels.scores import score_codes

    addresses = torch.zeros(32, dtype=torch.int64)

    def move(function: Callable[..., None], row_dim: int, dtype: torch.dtype, count: bool) -> Callable[[], object]:
        rows = torch.empty(1, 8, 6001, row_dim, dtype=dtype)
        slots = torch.zeros(rows.shape[:3], dtype=torch.int64)
        return lambda: function(addresses, slots, torch.zeros(1, 8).long() if count else None, rows, 1024)

    def score(head_dim: int, groups: int, nbits: int) -> Callable[[], object]:
        num_bytes = -(-head_dim * nbits // 8)
        codes = torch.zeros(1, 8, 40000, num_bytes, dtype=torch.uint8)[:, :, :32001]
        scale = torch.zeros(1, 8, 40000, dtype=torch.float16)[:, :, :32001]
        return lambda: score_codes(codes, scale, torch.zeros(1, 8, groups, head_dim), nbits)

    moves = [
        (gather_rows, 256, torch.bfloat16, True),
        (gather_rows, 72, torch.bfloat16, True),
        (gather_rows, 1024, torch.float32, True),
        (gather_rows, 130, torch.bfloat16, False),
        (gather_rows, 129, torch.float16, False),
        (write_rows, 256, torch.bfloat16, True),
        (write_rows, 129, torch.float16, False),
    ]
    scores = [(128, 4, 4), (128, 7, 2), (128, 4, 8), (80, 1, 2), (256, 8, 4), (128, 64, 4)]
    calls: dict[str, tuple[bool, Callable[[], object]]] = {}
    for function, row_dim, dtype, has_vectors in moves:
        name = f"{function.__name__} R={row_dim} {str(dtype).removeprefix('torch.')}"
        calls[name] = has_vectors, move(function, row_dim, dtype, function is gather_rows)
    for head_dim, groups, nbits in scores:
        calls[f"score_codes D={head_dim} G={groups} {nbits} bits"] = True, score(head_dim, groups, nbits)
    return calls


def record(call: Callable[[], object]) -> list[tuple[object, dict[str, object]]]:
    """The launches of a call: kernel and keyword arguments."""
    from triton.runtime.jit import JITFunction

    launches = []
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launches.append((self, kwargs))
    try:
        call()
    finally:
        JITFunction.run = run
    return launches


def report(capability: int) -> list[str]:
    """A line per kernel compiled for a capability."""
    from kvcache_plugins.eval.machine_code import compile_for, resources

    lines = []
    for name, (has_vectors, call) in calls().items():
        ((kernel, kwargs),) = record(call)
        compiled = compile_for(kernel, kwargs, capability)
        # The least that any GPU since sm_80 has for a program
        assert compiled.metadata.shared <= 99 * 1024, name
        used = resources(compiled)
        # Rows that are moved, or codes that are read: at once, or one by one
        moved = "16 bytes at once" if VECTORS.search(compiled.asm["ptx"]) else "word by word"
        assert (moved == "16 bytes at once") == has_vectors, name
        lines.append(
            f"sm_{capability} {name} ({compiled.metadata.num_warps} warps): {used['registers']} registers, "
            f"{used['spilled']} bytes spilled, {compiled.metadata.shared} shared, {moved}"
        )
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.long), 90])
def test_every_variant_compiles_without_spills(capability, run_compiling) -> None:
    lines = run_compiling(str(capability)).splitlines()
    assert len(lines) == 13
    assert [line for line in lines if " 0 bytes spilled" not in line] == []


if __name__ == "__main__":
    sys.stdout.write("\n".join(report(int(sys.argv[1]))) + "\n")
