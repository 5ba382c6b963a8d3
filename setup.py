"""Compiles the C kernels into a wheel, or beside their sources for an editable install; all else is in setup.cfg.

`KVCACHE_PLUGINS_WHEEL` names the platform of a wheel for another machine, which `ziglang` compiles for; `any` makes
one without kernels.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


# For each platform the target as zig names it, machine and system as Python does
TARGETS = {
    "manylinux_2_17_x86_64": ("x86_64-linux-gnu.2.17", "x86_64", "Linux"),
    "manylinux_2_17_aarch64": ("aarch64-linux-gnu.2.17", "aarch64", "Linux"),
    "macosx_11_0_x86_64": ("x86_64-macos.11.0", "x86_64", "Darwin"),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", "arm64", "Darwin"),
    "win_amd64": ("x86_64-windows-gnu", "AMD64", "Windows"),
}
PLATFORM = os.environ.get("KVCACHE_PLUGINS_WHEEL")
if PLATFORM not in (None, "any", *TARGETS):
    raise ValueError(f"`KVCACHE_PLUGINS_WHEEL` has to be `any` or one of {', '.join(TARGETS)}, but got {PLATFORM!r}")
KERNELS = runpy.run_path("src/kvcache_plugins/kernels/build.py")
TARGET, MACHINE, SYSTEM = TARGETS.get(PLATFORM or "", (None, None, None))
# Empty where kernels are not wanted, or `ziglang` is still to be installed
COMPILER = KERNELS["zig"]("-target", TARGET) if TARGET else KERNELS["compiler"]() if PLATFORM is None else []


class BuildWithKernels(build_py):
    """Compiles the kernels where there is a compiler; attention runs in PyTorch without them."""

    def run(self) -> None:
        """Builds the modules, and the library beside them."""
        super().run()
        if COMPILER:
            folder = Path("src" if self.editable_mode else self.build_lib) / "kvcache_plugins" / "kernels" / "lib"
            KERNELS["build"](folder, command=COMPILER, machine=MACHINE, system=SYSTEM)
        elif PLATFORM is None:
            print("no C compiler: the kernels are not compiled", file=sys.stderr)  # noqa: T201


class PlatformWheel(bdist_wheel):
    """Names the platform of a wheel with kernels; of Python it needs no certain version, as no kernel knows of it."""

    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's Python, its binary interface and its platform."""
        tag: tuple[str, str, str] = super().get_tag()
        return ("py3", "none", PLATFORM or tag[2]) if COMPILER else tag


class DistributionWithKernels(Distribution):
    """Goes where platforms differ, if there are kernels."""

    def has_ext_modules(self) -> bool:
        """Tells whether there are kernels."""
        return bool(COMPILER)


setup(
    distclass=DistributionWithKernels,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
    # Whoever builds installs it before it builds
    setup_requires=["ziglang"] if TARGET or (PLATFORM is None and not COMPILER) else [],
)
