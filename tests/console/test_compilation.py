"""Compilations say once that they take a while."""

import subprocess
import sys

import pytest

from kvcache_plugins.console.display import open_progress


# A driver that knows what to compile for, and launches nothing
ON_GPU = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import torch, triton
from triton.backends.compiler import GPUTarget
from kvcache_plugins.console.display import announce_compilation

class Driver:
    get_current_device = get_current_stream = lambda self, device=None: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
announce_compilation("cuda")
announce_compilation("cuda")
{kernel}
for count in (16, 32):
    print(len(kernel.warmup(torch.float32, count, grid=(1,)).asm["cubin"]) > 0)
"""
KERNEL = """
import triton, triton.language as tl

@triton.jit
def kernel(x, count: tl.constexpr):
    tl.store(x + tl.arange(0, count), 1.0)
"""


def test_kernels_for_a_gpu_are_said_once(tmp_path) -> None:
    pytest.importorskip("triton")
    # Triton reads the source of a kernel from its file
    (tmp_path / "kernel_file.py").write_text(KERNEL, encoding="utf-8")
    code = ON_GPU.format(kernel=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kernel_file import kernel")
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert finished.stdout == "True\nTrue\n", finished.stderr
    assert finished.stderr.splitlines() == [
        "Preparing kernels for this GPU: the first time each is compiled, for seconds"
    ]


def test_bars_share_one_display() -> None:
    with open_progress() as outer:
        with open_progress() as inner:
            assert inner is outer
        # Still drawn
        assert outer.live.is_started
    with open_progress() as later:
        assert later is not outer
