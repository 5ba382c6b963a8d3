"""Compiles the C kernels into one library, with nothing but Python's own modules: `python build.py [FOLDER [FLAGS]]`.

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
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
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
FLAGS = [
    *("-O3", "-std=gnu11", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
]


def compiler() -> list[str]:
    """The command that compiles C on this machine; empty where there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        # On macOS the name may be a stub that only prints how to install the compiler
        if shutil.which(name) and not _result([name, "-fsyntax-only", str(SOURCES / "level.c")]).returncode:
            return [name]
    # Like other compilers, compile for any processor of the architecture: the default of zig is this processor
    return [*zig(), "-mcpu=baseline"] if find_spec("ziglang") else []


def zig(*flags: str) -> list[str]:
    """The command that compiles C by the package `ziglang`."""
    return [sys.executable, "-m", "ziglang", "cc", *flags]


def digest() -> int:
    """The checksum of the sources: their library says it, so that one of older sources is not used."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))))


def levels(machine: str) -> dict[str, list[str]]:
    """Levels of instructions of a kind of machine, the lowest first, and the flags of each."""
    machine = machine.lower()
    if machine in ("x86_64", "amd64"):
        return _X86_LEVELS
    return {"neon": []} if machine in ("aarch64", "arm64") else {"plain": []}


def definitions(level: str) -> list[str]:
    """The flags that tell sources the level they are compiled for."""
    return [f"-DKVC_LEVEL={level}", f"-DKVC_IS_{level.upper()}=1", f"-DKVC_SOURCES={digest()}u"]


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
    Compile the library into a folder.

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
                flags_of_level = [*FLAGS, *position, *own, *definitions(level), *flags]
                objects.append([*command, *flags_of_level, "-c", str(source), "-o", made])
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, objects))
        made = str(Path(scratch) / target.name)
        _run([*command, "-shared", *(flags or ["-O3", "-s"]), *(each[-1] for each in objects), "-lm", "-o", made])
        # Under another name first: who has the old one open keeps it
        fresh = shutil.copy(made, folder / f"{target.name}.{os.getpid()}")
        os.replace(fresh, target)
    return target


def _result(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(command: list[str]) -> None:
    result = _result(command)
    if result.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed:\n{result.stderr}")
    sys.stderr.write(result.stderr)


if __name__ == "__main__":
    folder, *flags = sys.argv[1:] or [str(Path(__file__).parent / "lib")]
    print(build(Path(folder), flags=tuple(flags)))  # noqa: T201
