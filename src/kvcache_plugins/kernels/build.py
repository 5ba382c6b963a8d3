"""Compiles the C kernels into one library, with nothing but Python's own modules: `python build.py [FOLDER]`.

Every source is compiled once for each level of instructions, under names that end in the level; `library` picks a
level by what the processor says. The compiler is `CC`, else `cc`, else `python -m ziglang cc`.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


SOURCES = Path(__file__).parent / "cpu"
_X86_LEVELS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mavx512vnni"),
        *("-mavx2", "-mfma", "-mf16c"),
    ],
}
# Rounding is as written but for fused multiply-adds; nothing reads `errno`
_FLAGS = [
    *("-O3", "-std=gnu11", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-warning-option", "-Wno-ignored-optimization-argument"),
]


def compiler() -> list[str]:
    """The command that compiles C on this machine; empty where there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    try:
        import ziglang  # noqa: F401
    except ImportError:
        return []
    return [sys.executable, "-m", "ziglang", "cc"]


def levels(machine: str) -> dict[str, list[str]]:
    """Levels of instructions of a kind of machine, the lowest first, and the flags of each."""
    machine = machine.lower()
    if machine in ("x86_64", "amd64"):
        return _X86_LEVELS
    return {"neon": []} if machine in ("aarch64", "arm64") else {"plain": []}


def library_name(system: str) -> str:
    """The library's file name on a system."""
    return "libkvcache_plugins" + {"Windows": ".dll", "Darwin": ".dylib"}.get(system, ".so")


def build(
    folder: Path,
    *,
    command: list[str] | None = None,
    machine: str | None = None,
    system: str | None = None,
    flags: tuple[str, ...] = (),
) -> Path:
    """
    Compiles the library into a folder.

    Args:
        folder (`Path`): where it goes.
        command (`list[str]`, *optional*, defaults to `compiler()`): compiles C.
        machine, system (`str`, *optional*): what it is for, as `platform` names them; this machine by default.
        flags (`tuple[str, ...]`, *optional*): further flags.

    Returns:
        `Path`: the library's.

    Raises:
        RuntimeError: if there is no compiler, or it fails.
    """
    command = compiler() if command is None else command
    if not command:
        raise RuntimeError("no C compiler: set `CC`, install one, or `pip install ziglang`")
    machine, system = machine or platform.machine(), system or platform.system()
    position = [] if system == "Windows" else ["-fPIC"]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(system)
    with tempfile.TemporaryDirectory() as scratch:
        objects: list[list[str]] = []
        for level, own in levels(machine).items():
            for source in sorted(SOURCES.glob("*.c")):
                made = str(Path(scratch) / f"{source.stem}_{level}.o")
                named = [f"-DKVC_LEVEL={level}", f"-DKVC_IS_{level.upper()}=1"]
                objects.append([*command, *_FLAGS, *position, *own, *named, *flags, "-c", str(source), "-o", made])
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, objects))
        # Under another name first: who has the old one open keeps it
        fresh = folder / f"{target.name}.{os.getpid()}"
        _run([*command, "-shared", *flags, *(each[-1] for each in objects), "-lm", "-o", str(fresh)])
        os.replace(fresh, target)
    return target


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed:\n{result.stderr}")
    sys.stderr.write(result.stderr)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "lib"))  # noqa: T201
