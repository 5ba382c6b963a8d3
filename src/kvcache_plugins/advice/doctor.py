"""Findings of `kvcache-plugins doctor`: versions, devices, kernels, models, and what to do about what is missing.

Packages come from the project's own requirements, kernels from `kernels.engine`, caches from the registry. The package
can work unless there is an error: a required package that is missing, broken or not supported, or a kernel that would
be chosen and cannot run. An optional package is a hint; whatever importing it raises is a finding.
"""

import contextlib
import io
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
import torch.nn.functional as F
from packaging.requirements import Requirement

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_coding_kernel, explain_kernel, load_triton, requested_kernel
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import is_converted
from kvcache_plugins.registry import create_cache, describe_caches


DISTRIBUTION = "kvcache-plugins"
REQUIRED = "required"
# What each extra is for; the others are for those who work on the project
EXTRAS = {
    "reference": "converting the reference models",
    "peers": "the caches quanto-* and hqq-*",
    "eval": "lm-eval's tasks, figures",
}
# Relative RMS error of attention in float32 that rounding explains
_MAX_ERROR = 1e-3
_IMPORT_NAMES = {"optimum-quanto": "optimum.quanto"}
_SETTINGS = (
    *("KVCACHE_PLUGINS_KERNELS", "KVCACHE_PLUGINS_HOME", "TRITON_INTERPRET"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE"),
)
# What importing or running somebody else's code can raise; a library that cannot be loaded is an `OSError`
_FAILURES: tuple[type[Exception], ...] = (ImportError, AttributeError, NameError, TypeError, ValueError, OSError)
_FAILURES += (RuntimeError, LookupError, SyntaxError, AssertionError)


class WrongKernelError(RuntimeError):
    """Raised where a kernel's output differs from plain PyTorch."""


def examine(check: bool = False) -> dict[str, object]:
    """
    Examines what works on this machine, for JSON: `works` unless an error is among `findings`. To `check`, attention
    is run on every device against plain PyTorch, which may compile for a minute.
    """
    packages = _packages()
    gpus = [
        {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
        for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    kernels = [_kernels(device, check) for device in ("cpu", *(["cuda"] if gpus else []))]
    triton, models = _triton(bool(gpus)), list[dict[str, object]]()
    found = [*_package_findings(packages), *_kernel_findings(kernels, triton)]
    for name, model in PACKAGED_MODELS.items():
        version = model.installed_version()
        own = {"name": name, "package": model.distribution, "version": version, "hub_name": model.hub_name}
        models.append({**own, "is_converted": version is not None and is_converted(name, version)})
        if version is None:
            what = f"{name} is not installed: it would come from the hub, as {model.hub_name}"
            found.append(("hint", what, model.install))
    findings = _merge(found)
    return {
        "works": not any(finding["severity"] == "error" for finding in findings),
        "version": metadata.version(DISTRIBUTION),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "gpus": gpus,
        "triton": triton,
        "kernels": kernels,
        "threads": {
            "torch": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        },
        "settings": {name: os.environ.get(name) for name in _SETTINGS},
        "models": models,
        "caches": _caches(packages),
        "findings": findings,
    }


def _packages() -> list[dict[str, Any]]:
    """Lists each package that the project requires, itself or by an extra of `EXTRAS`, and the state it is in."""
    found: dict[str, tuple[Requirement, str]] = {}
    for requirement in map(Requirement, metadata.requires(DISTRIBUTION) or []):
        # What the project itself asks for, with no extra, may depend on the machine
        for extra in ("", *EXTRAS):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found.setdefault(requirement.name, (requirement, extra))
                break
    return [_package(*each) for each in found.values()]


def _package(requirement: Requirement, extra: str) -> dict[str, Any]:
    """Describes a package; its `status` is `ok`, `missing`, `unsupported` (its version) or `broken` (on import)."""
    name, wanted = requirement.name, f"{requirement.name}{requirement.specifier}"
    advice = f"pip install '{wanted}'" if not extra else f"pip install '.[{extra}]' in a clone of the repository"
    found: dict[str, Any] = {"name": name, "needed_for": EXTRAS.get(extra, REQUIRED), "version": None}
    try:
        found["version"] = metadata.version(name)
    except metadata.PackageNotFoundError:
        return {**found, "status": "missing", "detail": f"{wanted} is not installed", "advice": advice}
    if not requirement.specifier.contains(found["version"], prereleases=True):
        detail = f"{wanted} is needed, but {found['version']} is installed"
        return {**found, "status": "unsupported", "detail": detail, "advice": advice}
    with _silence():
        error = _error_of(lambda: import_module(_IMPORT_NAMES.get(name, name.replace("-", "_"))))
    if error is not None:
        return {**found, "status": "broken", "detail": error, "advice": f"pip install --force-reinstall '{wanted}'"}
    return {**found, "status": "ok", "detail": None, "advice": None}


def _error_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except _FAILURES as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    # Packages that are imported greet, or warn of what is not this one's matter
    streams = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with streams[0], streams[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _triton(has_gpu: bool) -> dict[str, str | None]:
    """Tells whether a Triton kernel runs: `runs`, `interpreted`, `unused`, `missing` or `fails`."""
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return {"status": "missing", "detail": "Triton is not installed"}
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not has_gpu and not is_interpreted:
        return {"status": "unused", "detail": "there is no GPU, and TRITON_INTERPRET=1 is not set"}
    error = _error_of(lambda: _launch_kernel(torch.device("cuda" if has_gpu and not is_interpreted else "cpu")))
    if error is not None:
        return {"status": "fails", "detail": error}
    return {"status": "interpreted" if is_interpreted else "runs", "detail": None}


def _launch_kernel(device: torch.device) -> None:
    triton = load_triton()
    page = torch.arange(64, dtype=torch.float32, device=device).reshape(1, 1, 16, 4)
    slots = torch.tensor([[[3, 1]]], dtype=torch.int64, device=device)
    rows = torch.zeros(1, 1, 2, 4, dtype=torch.float32, device=device)
    triton.gather_rows(triton.page_addresses([page], device), slots, None, rows, 16)
    if not torch.equal(rows, page[:, :, [3, 1]]):
        raise WrongKernelError("the kernel that gathers rows returned other rows")


def _kernels(device: str, check: bool) -> dict[str, Any]:
    """Tells the kernels of a device, and why they are less than what was wanted or cannot run at all."""
    found: dict[str, Any] = {"device": device, "attention": None, "coding": None}
    found |= {"reason": None, "error": None, "check": None}
    try:
        found["attention"], found["reason"] = explain_kernel(device)
        with _silence():
            found["coding"] = choose_coding_kernel(torch.empty(0, dtype=torch.float32, device=device))
    except ValueError as error:
        return {**found, "error": str(error)}
    if check:
        with _silence():
            found["error"] = _error_of(lambda: found.update(check=check_attention(torch.device(device))))
    return found


def check_attention(device: torch.device) -> float:
    """
    Return the relative RMS error of decode attention over packed states against attention over the same states made
    dense; a `WrongKernelError` if it is above what rounding explains.
    """
    cache = create_cache("gear-2bit")
    generator = torch.Generator().manual_seed(42)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    keys, values = (draw(1, 2, 256, 64).to(device) for _ in range(2))
    query = draw(1, 4, 1, 64).to(device)
    with torch.inference_mode():
        cache.update(keys, values, 0)
        layer: LazyLayer = cache.layers[0]  # type: ignore[assignment]
        layer.settle_prompt()
        output = layer.attend(AttentionCall(query))
        dense = layer.materialize("keys"), layer.materialize("values")
        expected = F.scaled_dot_product_attention(query, *dense, enable_gqa=True)
    error = float(((output - expected).square().mean() / expected.square().mean()).sqrt())
    # Not `>=`: NaN has to fail
    if not error < _MAX_ERROR:
        raise WrongKernelError(f"attention over a compressed cache is wrong by {error:.1e}")
    return error


def _caches(packages: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Lists all caches, and why some cannot be used. A third party's that cannot be loaded stands in a warning."""
    broken = {package["name"]: package["detail"] for package in packages if package["status"] == "broken"}
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


# Severity (`error` if the package cannot work without it, else `hint`), what was found, and what mends it
_Finding = tuple[str, str, str]


def _merge(findings: list[_Finding]) -> list[dict[str, str]]:
    merged: dict[str, dict[str, str]] = {}
    for severity, what, advice in findings:
        if before := merged.get(advice):
            severity, what = min(before["severity"], severity), f"{before['what']}; {what}"
        merged[advice] = {"severity": severity, "what": what, "advice": advice}
    return sorted(merged.values(), key=lambda row: row["severity"])


def _package_findings(packages: list[dict[str, Any]]) -> Iterator[_Finding]:
    for package in packages:
        if package["status"] != "ok":
            is_required = package["needed_for"] == REQUIRED
            what = f"{package['name']} is broken: " if package["status"] == "broken" else ""
            what += package["detail"] + ("" if is_required else f" ({package['needed_for']})")
            yield "error" if is_required else "hint", what, package["advice"]


def _kernel_findings(kernels: list[dict[str, Any]], triton: dict[str, str | None]) -> Iterator[_Finding]:
    for kernel in kernels:
        if kernel["error"] is not None:
            what = f"attention on {kernel['device']} does not work: {kernel['error']}"
            yield "error", what, "KVCACHE_PLUGINS_KERNELS=torch does without kernels"
        elif kernel["reason"] is not None:
            what = f"attention on {kernel['device']} runs in plain PyTorch, which is slower: {kernel['reason']}"
            advice = "pip install triton" if kernel["device"] != "cpu" else "python -m kvcache_plugins.kernels.build"
            yield "hint", what, advice if requested_kernel() == "auto" else "unset KVCACHE_PLUGINS_KERNELS"
    if triton["status"] == "fails":
        is_chosen = any("triton" in (kernel["attention"], kernel["coding"]) for kernel in kernels)
        advice = "Triton needs a C compiler (gcc or clang, or CC); KVCACHE_PLUGINS_KERNELS=torch does without Triton"
        yield "error" if is_chosen else "hint", f"Triton kernels do not run: {triton['detail']}", advice
