"""The library of C kernels: levels of instructions, threads, and machines without a library."""

import ctypes
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
import torch

from kvcache_plugins.formats.parts import DensePart
from kvcache_plugins.kernels import build, library
from kvcache_plugins.kernels.c_structs import STRUCTURES, make
from kvcache_plugins.kernels.compiled import PreparedCall


NUM_TASKS = 2000
# Linux's names of the instructions that each level adds to the one below
FLAGS_OF_LEVELS = {
    "avx2": {"avx", "avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_vnni"},
}
needs_library = pytest.mark.skipif(library.why_missing() is not None, reason=library.why_missing() or "")


@needs_library
class TestLevels:
    def test_highest_level_is_the_default(self, monkeypatch):
        monkeypatch.delenv("KVCACHE_PLUGINS_CPU_LEVEL", raising=False)
        assert library.level() == library.levels_here()[-1]

    @pytest.mark.parametrize("level", library.levels_here())
    def test_level_is_chosen_by_name(self, monkeypatch, level):
        monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", level)
        assert library.level() == level

    def test_unknown_level_is_refused(self, monkeypatch):
        monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", "mmx")
        accepted = f"has to be one of {', '.join(library.levels_here())}, but got 'mmx'"
        with pytest.raises(ValueError, match=f"`KVCACHE_PLUGINS_CPU_LEVEL` {accepted}"):
            library.bind("attend", make("AttentionArgs"), 1)

    @pytest.mark.skipif(
        not Path("/proc/cpuinfo").exists() or platform.machine() != "x86_64", reason="Linux on x86-64 lists them"
    )
    @pytest.mark.parametrize("compiler", ["own", "zig"])
    def test_detected_level_equals_the_flags_of_the_system(self, tmp_path, compiler):
        if compiler == "zig" and find_spec("ziglang") is None:
            pytest.skip("needs `ziglang`, which wheels are made by")
        command = [*build.zig(), "-mcpu=baseline"] if compiler == "zig" else build.compiler()
        made = tmp_path / "level.so"
        flags = [*build.FLAGS, "-fPIC", "-shared", *build.definitions("plain")]
        subprocess.run([*command, *flags, str(build.SOURCES / "level.c"), "-o", str(made)], check=True)
        highest = ctypes.CDLL(str(made)).kvc_level
        highest.restype = ctypes.c_char_p

        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = set(next(line for line in lines if line.startswith("flags")).split())
        expected = "plain"
        for level, needed in FLAGS_OF_LEVELS.items():
            expected = level if needed <= flags else expected
        assert highest().decode() == expected


@pytest.fixture(params=["openmp", "python"])
def pool(request, monkeypatch):
    """Picks PyTorch's threads, or those that take their place on other systems."""
    if request.param == "python":
        monkeypatch.setattr(library, "run_on_threads", library._run_on_python_threads)


class Call(ctypes.Structure):
    _fields_ = (("tasks", STRUCTURES["Tasks"]),)


def run(kernel, call, threads):
    library.run_on_threads(kernel, ctypes.addressof(call), threads, 0)


def tasks_done(num_threads: int) -> list[int]:
    """Takes tasks as kernels do, in Python, which any thread may call."""
    done, numbers = [], count()

    @library._FUNCTION
    def kernel(address):
        call = Call.from_address(address)
        for task in iter(numbers.__next__, None):
            if task >= call.tasks.count:
                return
            done.append(task)

    run(kernel, Call((0, NUM_TASKS, 0)), num_threads)
    return done


def called_at_once(function):
    """Calls a function in four threads of Python, and returns what each gets."""
    with ThreadPoolExecutor(4) as callers:
        return [each.result() for each in [callers.submit(function) for _ in range(4)]]


@needs_library
@pytest.mark.parametrize("num_threads", [1, 2, 5], indirect=True)
class TestThreads:
    def test_requested_number_of_threads_run_at_once(self, num_threads, pool):
        # After work of PyTorch's own, whose threads may still be awake
        torch.randn(300, 300) @ torch.randn(300, 300)
        # Passes when all have come
        barrier, seen = threading.Barrier(num_threads, timeout=600), set()

        @library._FUNCTION
        def kernel(address):
            barrier.wait()
            seen.add(threading.get_ident())

        run(kernel, Call(), num_threads)
        assert len(seen) == num_threads

    def test_all_tasks_are_done_when_a_call_returns(self, num_threads, pool):
        assert sorted(tasks_done(num_threads)) == list(range(NUM_TASKS))

    def test_concurrent_callers_each_get_their_tasks_done(self, num_threads, pool):
        results = called_at_once(lambda: tasks_done(num_threads))
        assert [sorted(done) for done in results] == [list(range(NUM_TASKS))] * 4

    def test_concurrent_callers_get_equal_results(self, num_threads, pool):
        query, keys, values = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 3000, 64), torch.randn(1, 2, 3000, 48)
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        def attend():
            return PreparedCall(query, [DensePart(keys, values, 3000, None)], 2, 64**-0.5).attend(query)

        for result in called_at_once(attend):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)

    def test_a_forked_process_has_one_thread(self, monkeypatch, num_threads):
        assert library.num_threads() == num_threads
        monkeypatch.setattr(library, "_PROCESS", os.getpid() + 1)
        assert library.num_threads() == 1


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of that kind is Linux's")
def test_kernels_run_on_the_threads_of_pytorch():
    assert library.run_on_threads is not library._run_on_python_threads


class TestMissing:
    @pytest.fixture(autouse=True)
    def forgotten(self):
        """Looks for the library anew, and again when a test has ended."""
        library._library.cache_clear()
        yield
        library._library.cache_clear()

    @pytest.fixture(params=["none", "no-library", "of-other-sources"])
    def missing(self, request, monkeypatch, tmp_path):
        if request.param == "of-other-sources":
            monkeypatch.setattr(library, "digest", lambda: 0)
        else:
            monkeypatch.setattr(library, "FOLDER", tmp_path)
            if request.param == "no-library":
                (tmp_path / library.library_name("Linux")).write_text("no library")

    def test_reason_names_the_build_command(self, missing):
        assert "`python -m kvcache_plugins.kernels.build`" in (library.why_missing() or "")
