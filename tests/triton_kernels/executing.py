"""A plugin of pytest: kernels compiled for a GPU that is not there, and their PTX executed by an emulator.

`test_executed.py` starts pytest with it. The emulator, `ptx_run`, takes Triton's launches on CPU tensors.
"""

import importlib
import os
import pkgutil


# Before Triton: kernels are to be compiled, not interpreted
os.environ["TRITON_INTERPRET"] = "0"
import driver as emulator
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import kvcache_plugins.triton_kernels as kernels


def install():
    """Has Triton compile to PTX and launch by the emulator, and the package take paths of NVIDIA's GPUs on CPUs."""
    driver.set_active(emulator.Driver())
    JITFunction._do_compile = emulator._compile
    begin, add_stages = CUDABackend.__init__, CUDABackend.add_stages

    def begin_with_ptx(self, target):
        begin(self, target)
        self.binary_ext = "ptx"

    def add_all_but_cubin(self, stages, options, language):
        add_stages(self, stages, options, language)
        del stages["cubin"]

    CUDABackend.__init__, CUDABackend.add_stages = begin_with_ptx, add_all_but_cubin
    names = [name for _, name, _ in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")]
    modules = [importlib.import_module(name) for name in [*names, *LAUNCHERS]]
    for module in modules:
        if hasattr(module, "has_pairs"):
            module.has_pairs = lambda device_type: True
    # A GPU of the target has no more, whatever the emulator has
    most = 1024 * emulator.MAX_SHARED[emulator.CAPABILITY]
    importlib.import_module("kvcache_plugins.kernels.triton").shared_memory = lambda device: most
    knobs.runtime.interpret = False
    # To the package tensors on the CPU are for Triton then
    os.environ["TRITON_INTERPRET"] = "1"


LAUNCHERS = ["kvcache_plugins.kernels.triton"]
install()


def pytest_terminal_summary(terminalreporter):
    """Writes what was launched, and each report of the emulator."""
    terminalreporter.write_line(emulator.summary())
