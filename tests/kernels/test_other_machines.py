"""Kernels of another kind of processor, in an emulator: they leave what this machine's leave, in the tests of this
folder. `ziglang` compiles them into a program without Python, which `replaying.py` hands recorded calls to."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcache_plugins.kernels import build, library


FOLDER = Path(__file__).parent
# Target as zig names it, level, emulator
MACHINES = {"aarch64": ("aarch64-linux-musl", "neon", "qemu-aarch64")}


def make_program(folder: Path, target: str, level: str) -> Path:
    sources = sorted(build.SOURCES.glob("*.c"))
    names = {name for source in sources for name in re.findall(r"^EXPORT\((\w+)\)", source.read_text(), re.MULTILINE)}
    kernels = " ".join(f"KERNEL({name})" for name in sorted(names))
    # The reference, the lowest level here, rounds products before they are added
    flags = [
        *build.FLAGS,
        "-ffp-contract=off",
        *build.definitions(level),
        f"-DKERNELS={kernels}",
        f"-I{build.SOURCES}",
    ]
    program = folder / "replay"
    command = [*build.zig("-target", target), *flags, *map(str, sources), str(FOLDER / "replay.c"), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES)
def test_kernels_of_another_machine_agree(machine: str, tmp_path: Path) -> None:
    target, level, emulator = MACHINES[machine]
    if find_spec("ziglang") is None:
        pytest.skip("compiling for other machines needs `ziglang`")
    if shutil.which(emulator) is None:
        pytest.skip(f"needs `{emulator}`, for instance of Debian's package qemu-user")
    if library.why_missing():
        pytest.skip("there is nothing to compare with: " + library.why_missing())
    environment = {
        **os.environ,
        "REPLAY": f"{emulator} {make_program(tmp_path, target, level)}",
        "KVCACHE_PLUGINS_CPU_LEVEL": library.levels_here()[0],
        "PYTHONPATH": str(FOLDER),
    }
    options = ["-q", "-n", "0", "-p", "replaying", "-p", "no:cacheprovider", "-m", "not slow and not long"]
    # Threads and refused inputs leave nothing to compare
    options += ["--ignore", str(FOLDER / "test_library.py")]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (counts,) = re.findall("^replayed: (.*)$", done.stdout, re.MULTILINE)
    assert {"attend"} <= ast.literal_eval(counts).keys(), done.stdout
