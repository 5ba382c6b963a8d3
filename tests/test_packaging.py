"""Packages on disk, those that setup.cfg lists and those that the wheel holds are the same.

A package that setup.cfg does not list works in an editable install and is silently absent from the wheel.
"""

import configparser
import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvcache_plugins.kernels.build import compiler, library_name


PROJECT_ROOT = Path(__file__).resolve().parents[1]
BUILD_INPUTS = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "src", "triton_kernels", "eval")
SOURCES = PROJECT_ROOT / "src" / "kvcache_plugins"


def read_setup_cfg() -> tuple[dict[str, Path], set[str]]:
    """The folder of each mapped package, and the packages listed."""
    parser = configparser.ConfigParser()
    parser.read(PROJECT_ROOT / "setup.cfg", encoding="utf-8")
    lines = (line.split("=") for line in parser["options"]["package_dir"].split("\n") if line)
    folders = {package.strip(): PROJECT_ROOT / folder.strip() for package, folder in lines}
    return folders, set(parser["options"]["packages"].split())


def modules_on_disk() -> dict[str, Path]:
    """Map the path of each Python file in a wheel to its path on disk."""
    folders, _ = read_setup_cfg()
    return {
        "/".join([*package.split("."), *path.relative_to(folder).parts]): path
        for package, folder in folders.items()
        for path in folder.rglob("*.py")
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, run_python) -> zipfile.ZipFile:
    """The wheel, built once from a copy of the sources: a build leaves folders behind that a later one would pack."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILD_INPUTS:
        path = PROJECT_ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    environment = {}
    if compiler():
        # Not optimized, which takes a quarter of the time
        script = source / "cc.py"
        script.write_text(f"import subprocess, sys; sys.exit(subprocess.call([*{compiler()}, *sys.argv[1:], '-O0']))")
        environment["CC"] = shlex.join([sys.executable, str(script)])
    run_python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", target, source, **environment)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_package_on_disk_is_listed() -> None:
    _, listed = read_setup_cfg()
    on_disk = {name.rpartition("/")[0].replace("/", ".") for name in modules_on_disk()}
    assert on_disk == listed


def test_every_package_has_an_init() -> None:
    modules = modules_on_disk()
    missing = {name.rpartition("/")[0] for name in modules} - {name.removesuffix("/__init__.py") for name in modules}
    assert missing == set()


def test_wheel_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tasks = {f"kvcache_plugins/eval/tasks/{path.name}" for path in (PROJECT_ROOT / "eval" / "tasks").glob("*.yaml")}
    # Calibrations of the reference models, and what others are made of
    tensors, texts = (
        {f"kvcache_plugins/{path.relative_to(SOURCES)}" for path in SOURCES.rglob(f"*.{ending}")}
        for ending in ("safetensors", "txt")
    )
    assert tasks and tensors and texts
    sources = {f"kvcache_plugins/{path.relative_to(SOURCES)}" for path in SOURCES.glob("kernels/cpu/*.[ch]")}
    library = {f"kvcache_plugins/kernels/lib/{library_name(platform.system())}"} if compiler() else set()
    assert packed == {*modules_on_disk(), "kvcache_plugins/py.typed", *tasks, *tensors, *texts, *sources, *library}
    assert Path(wheel.filename or "").stem.endswith("py3-none-any") != bool(library)


def test_wheel_has_one_top_level_name_the_console_script_and_the_licence(wheel: zipfile.ZipFile) -> None:
    texts = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert texts["top_level.txt"].split() == ["kvcache_plugins"] and "LICENSE" in texts
    assert "kvcache-plugins = kvcache_plugins.cli:main" in texts["entry_points.txt"]


def test_wheel_is_importable(wheel: zipfile.ZipFile, tmp_path: Path, run_python) -> None:
    wheel.extractall(tmp_path)
    # All packages are found there; to import them all once more takes longer than to import their parents
    code = "import sys; from importlib.util import find_spec; [print(find_spec(name).origin) for name in sys.argv[1:]]"
    said = run_python("-c", code, *sorted(read_setup_cfg()[1]), cwd=tmp_path, PYTHONPATH=tmp_path).stdout
    assert all(Path(line).is_relative_to(tmp_path) for line in said.splitlines())


def test_top_level_name_of_the_kernels_is_guarded() -> None:
    """The repository's folder would shadow another project's `triton_kernels`, so importing it raises an error."""
    code = f"import sys; sys.path.insert(0, {str(PROJECT_ROOT)!r}); import triton_kernels"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "ImportError: The top-level name `triton_kernels` belongs to another project" in result.stderr
