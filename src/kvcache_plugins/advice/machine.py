"""This machine: GPUs, compilers, threads, and the kernels that are kept on its disk."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch


COMPILERS = {"c": ("CC", ("cc", "gcc", "clang")), "c++": ("CXX", ("c++", "g++", "clang++"))}


def find_gpus() -> list[dict[str, object]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = {"memory_bytes": properties.total_memory, "capability": capability}
        found.append({"name": properties.name, **memory})
    return found


def find_compiler(variable: str, names: tuple[str, ...]) -> dict[str, str] | None:
    told = os.environ.get(variable, "").split()
    path = next(filter(None, map(shutil.which, told[:1] or names)), None)
    if path is None:
        return None
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"path": path, "version": f"does not run: {error}"}
    return {"path": path, "version": (shown.splitlines() or [""])[0]}


def find_kernel_caches() -> dict[str, dict[str, object]]:
    """Where compiled kernels are kept from one process to the next, and how many files there are."""
    home = Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    folder = Path(os.environ.get("TRITON_CACHE_DIR", home))
    return {"triton": {"folder": str(folder), "num_kernels": sum(1 for _ in folder.glob("*/*.cubin"))}}


def count_threads() -> dict[str, int | None]:
    return {
        "torch": torch.get_num_threads(),
        "torch_interop": torch.get_num_interop_threads(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
    }
