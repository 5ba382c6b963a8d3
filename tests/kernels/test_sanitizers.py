"""The tests of this folder once more, by kernels that say so when they read or write where nothing of theirs is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache_plugins.kernels import build


FOLDER = Path(__file__).parent
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
# Tokens behind the end of a tensor, as a binding could say that forgot to check
BAD_CALL = """
import torch
from kvcache_plugins.kernels.compiled import PreparedCall
from kvcache_plugins.formats.parts import DensePart

query, part = torch.zeros(1, 1, 1, 64), DensePart(torch.zeros(1, 1, 100, 64), torch.zeros(1, 1, 100, 64), 100, None)
call = PreparedCall(query, [part], 1, 1.0)
call._parts[0].length = {}
call.attend(query, 1.0)
"""
pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc and its sanitizers")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Builds kernels with sanitizers; returns the environment that has a process load them."""
    folder = tmp_path_factory.mktemp("sanitized")
    build.build(folder, command=["gcc"], flags=FLAGS)
    names = ("libasan.so", "libubsan.so")
    found = (subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names)
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        # Python keeps what it has until it ends
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "KVCACHE_PLUGINS_KERNEL_LIBRARY": str(folder),
    }


def run(environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_kernels_stay_within_their_memory(environment: dict[str, str]) -> None:
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not long")
    done = run(environment, "-m", "pytest", *options, str(FOLDER))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("length", [100, 101])
def test_a_read_behind_a_tensor_is_reported(environment: dict[str, str], length: int) -> None:
    done = run(environment, "-c", BAD_CALL.format(length))
    assert ("AddressSanitizer: heap-buffer-overflow" in done.stderr) == (length > 100), done.stderr
    assert (done.returncode != 0) == (length > 100)
