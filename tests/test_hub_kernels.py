"""The folder of Triton's kernels for the hub: built, and loaded by processes that have nothing of this package."""

import json
import shutil
from pathlib import Path

import pytest


pytest.importorskip("triton")
SCRIPT = Path(__file__).resolve().parents[1] / "hub" / "kernels" / "build.py"
# Nothing of these can be imported after it
PREAMBLE = """
import importlib.util
import sys
from types import SimpleNamespace

import torch

for name in ("kvcache_plugins", "transformers", "triton_kernels"):
    sys.modules[name] = None
"""
LOAD = """
def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

kernels = [load(folder, f"name_{number}") for number, folder in enumerate(sys.argv[1:])]
"""
LOAD_BY_KERNELS = """
from kernels import get_local_kernel
from kernels._rust import Build
from pathlib import Path

assert [str(each) for each in Build.open(Path(sys.argv[1]).parents[1]).general.backends] == ["cuda", "rocm"]
kernels = [get_local_kernel(Path(folder)) for folder in sys.argv[1:]]
"""
CHECK = """
def states(codes, scale, zero):
    # Byte `j` of a token has channel `j` in its low bits, and the one half of all channels further in its high ones
    fields = torch.cat([codes & 15, codes >> 4], dim=-1).float()
    channels = fields.shape[-1] // scale.shape[-1]
    return fields * scale.repeat_interleave(channels, dim=-1) + zero.repeat_interleave(channels, dim=-1)

def check(module):
    for name in module.__all__:
        assert getattr(module, name).__module__.startswith(module.__name__ + "."), name
    sizes = (1, 2, 1, 100)
    codes = torch.randint(256, (2, *sizes, 32), dtype=torch.uint8)
    scale, zero = torch.rand(2, *sizes, 2).half() / 8, -torch.rand(2, *sizes, 2).half()
    sides = zip(codes, scale, zero)
    parts = dict.fromkeys(("low_rank_a", "low_rank_b", "outlier_indices", "outlier_values", "outlier_offsets"))
    parts |= {"nbits": 4, "axis": "token", "group_size": 32, "head_dim": 64}
    keys, values = (SimpleNamespace(codes=side[0], scale=side[1], zero=side[2], **parts) for side in sides)
    exact, query = torch.randn(2, 1, 2, 5, 64), torch.randn(1, 2, 3, 64)
    launch = module.prepare_groups(query, keys, values, num_chunks=1, length=100, scale=0.125, packed=False)
    found = module.prepare_combination([launch()], [module.DensePart(*exact)], query, 0.125)()
    dense = [torch.cat([states(*side).flatten(2, 3), own], dim=2) for *side, own in zip(codes, scale, zero, exact)]
    torch.testing.assert_close(found, (query @ dense[0].mT * 0.125).softmax(-1) @ dense[1], rtol=1e-4, atol=1e-4)
    keys = states(codes[0], scale[0, ..., :1], -7.5 * scale[0, ..., :1].float())
    scores = module.score_codes(codes[0].flatten(2, 3), scale[0, ..., 0].flatten(2), query, 4)
    torch.testing.assert_close(scores, query @ keys.flatten(2, 3).mT, rtol=1e-3, atol=1e-3)

torch.manual_seed(1)
assert kernels[0].prepare_groups is not kernels[1].prepare_groups
for module in kernels:
    check(module)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, run_python) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernels"
    run_python(SCRIPT, folder)
    return folder


@pytest.fixture
def load_and_check(run_python):
    """Return a function that loads folders in a new process and checks their results."""
    variables = {"TRITON_INTERPRET": 1, "OMP_NUM_THREADS": 1}
    return lambda load, *folders: run_python("-c", PREAMBLE + load + CHECK, *folders, cwd=folders[0], **variables)


@pytest.mark.slow
def test_kernels_load_twice_from_any_folder(repository: Path, tmp_path: Path, load_and_check) -> None:
    elsewhere = shutil.copytree(repository / "torch-ext" / "kvcache_kernels", tmp_path / "another name")
    load_and_check(LOAD, repository / "build" / "torch-cuda", elsewhere)


@pytest.mark.slow
def test_kernels_load_through_the_kernels_package(repository: Path, load_and_check) -> None:
    pytest.importorskip("kernels", reason="the package `kernels` is not installed")
    load_and_check(LOAD_BY_KERNELS, *(repository / "build" / f"torch-{backend}" for backend in ("cuda", "rocm")))


def test_builds_name_their_platform(repository: Path) -> None:
    builds = sorted((repository / "build").iterdir())
    assert [build.name for build in builds] == ["torch-cuda", "torch-rocm"]
    metadata = [json.loads((build / "metadata.json").read_text(encoding="utf-8")) for build in builds]
    assert [each["backend"] for each in metadata] == [{"type": "cuda"}, {"type": "rocm"}]
    assert len({each["id"] for each in metadata}) == 2
