"""Health report of `kvcache-plugins doctor`: versions, devices, kernels and models, and advice on whatever is missing.

Packages are read from the project's own requirements, kernels from `kernels.engine`, caches from the registry. An
error among the findings means that the package cannot work: a required package is missing, broken or not supported, or
a kernel that would be chosen does not run. A missing optional package is a hint. Errors of imports are findings too.
"""

import contextlib
import io
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module, metadata
from typing import Literal

import torch
import torch.nn.functional as F
from packaging.requirements import Requirement
from transformers.utils import import_utils

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_coding_kernel, explain_kernel, load_triton, requested_kernel
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import is_converted
from kvcache_plugins.registry import create_cache, describe_caches


DISTRIBUTION = "kvcache-plugins"
REQUIRED = "required"
# Purpose of each extra that users install, but `serving`, whose packages Transformers knows
EXTRAS = {
    "reference": "converting the reference models",
    "peers": "the caches quanto-* and hqq-*",
    "eval": "lm-eval's tasks, figures",
}
# Largest relative RMS error of attention in float32 that rounding explains
_MAX_ERROR = 1e-3
_IMPORT_NAMES = {"optimum-quanto": "optimum.quanto"}
_SETTINGS = (
    *("KVCACHE_PLUGINS_KERNELS", "KVCACHE_PLUGINS_HOME", "TRITON_INTERPRET"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE"),
)


class WrongKernelError(RuntimeError):
    """Error of a kernel whose output differs from plain PyTorch."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that the project requires, itself or by an extra of `EXTRAS`."""

    name: str
    needed_for: str
    version: str | None
    status: Literal["ok", "missing", "unsupported", "broken"]
    detail: str | None = None
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch finds."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True, slots=True)
class TritonState:
    """State of Triton's kernels, and the reason if none runs."""

    status: Literal["runs", "interpreted", "unused", "missing", "fails"]
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Kernels:
    """
    Kernels of a device, with the `reason` for a fallback, the `error` if none runs, and the error measured by `check`.
    """

    device: str
    attention: str | None = None
    coding: str | None = None
    reason: str | None = None
    error: str | None = None
    check: float | None = None


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads of torch, and cores: all, and those that this process may use where the system says so."""

    torch: int
    cores: int | None
    usable_cores: int | None


@dataclass(frozen=True, slots=True)
class ModelState:
    """A packaged model: its package, the installed version, and the same model's name on the hub."""

    name: str
    package: str
    version: str | None
    hub_name: str
    is_converted: bool


@dataclass(frozen=True, slots=True)
class CacheState:
    """A registered cache, and the reason if it cannot be used. The name is `None` if a third party's fails to load."""

    name: str | None
    is_usable: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something missing or broken, and advice. It is an `error` if the package cannot work, else a `hint`."""

    severity: Literal["error", "hint"]
    what: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """State of this machine for the package; `works` if there is no error among the findings."""

    works: bool
    version: str
    python: str
    platform: str
    packages: list[Package]
    gpus: list[Gpu]
    triton: TritonState
    kernels: list[Kernels]
    threads: Threads
    settings: dict[str, str | None]
    models: list[ModelState]
    caches: list[CacheState]
    findings: list[Finding]

    def to_dict(self) -> dict[str, object]:
        """Return all fields for JSON."""
        return asdict(self)


def examine(check: bool = False) -> HealthReport:
    """
    Examine this machine. With `check`, run attention on every device and compare it with plain PyTorch, which may
    compile for a minute.
    """
    packages = _examine_packages()
    gpus = [
        Gpu(each.name, each.total_memory, f"{each.major}.{each.minor}")
        for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    kernels = [_examine_kernels(device, check) for device in ("cpu", *(["cuda"] if gpus else []))]
    triton = _examine_triton(bool(gpus))
    models = _examine_models()
    of_packages = *_package_findings(packages), *_serving_findings()
    findings = _merge([*of_packages, *_kernel_findings(kernels, triton), *_model_findings(models)])
    return HealthReport(
        works=not any(finding.severity == "error" for finding in findings),
        version=metadata.version(DISTRIBUTION),
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        gpus=gpus,
        triton=triton,
        kernels=kernels,
        threads=Threads(
            torch=torch.get_num_threads(),
            cores=os.cpu_count(),
            usable_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        ),
        settings={name: os.environ.get(name) for name in _SETTINGS},
        models=models,
        caches=_examine_caches(packages),
        findings=findings,
    )


def _examine_packages() -> list[Package]:
    found: dict[str, tuple[Requirement, str]] = {}
    for requirement in map(Requirement, metadata.requires(DISTRIBUTION) or []):
        # A requirement without an extra may depend on the machine
        for extra in ("", *EXTRAS):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found.setdefault(requirement.name, (requirement, extra))
                break
    return [_examine_package(*each) for each in found.values()]


def _examine_package(requirement: Requirement, extra: str) -> Package:
    name = requirement.name
    wanted = f"{name}{requirement.specifier}"
    needed_for = EXTRAS.get(extra, REQUIRED)
    advice = f"pip install '{wanted}'" if not extra else f"pip install '.[{extra}]' in a clone of the repository"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Package(name, needed_for, None, "missing", f"{wanted} is not installed", advice)
    if not requirement.specifier.contains(version, prereleases=True):
        detail = f"{wanted} is needed, but {version} is installed"
        return Package(name, needed_for, version, "unsupported", detail, advice)
    with _silence():
        error = _error_of(lambda: import_module(_IMPORT_NAMES.get(name, name.replace("-", "_"))))
    if error is not None:
        return Package(name, needed_for, version, "broken", error, f"pip install --force-reinstall '{wanted}'")
    return Package(name, needed_for, version, "ok")


def _error_of(function: Callable[[], object]) -> str | None:
    """Call a function, and return the error that it raises: other packages and Triton's compiler raise any kind."""
    try:
        function()
    except Exception as error:
        return _on_one_line(error)
    return None


def _on_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress output and warnings of packages that are imported."""
    streams = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with streams[0], streams[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _examine_triton(has_gpu: bool) -> TritonState:
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return TritonState("missing", "Triton is not installed")
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not has_gpu and not is_interpreted:
        return TritonState("unused", "there is no GPU, and TRITON_INTERPRET=1 is not set")
    error = _error_of(lambda: _launch_kernel(torch.device("cuda" if has_gpu and not is_interpreted else "cpu")))
    if error is not None:
        return TritonState("fails", error)
    return TritonState("interpreted" if is_interpreted else "runs")


def _launch_kernel(device: torch.device) -> None:
    triton = load_triton()
    page = torch.arange(64, dtype=torch.float32, device=device).reshape(1, 1, 16, 4)
    slots = torch.tensor([[[3, 1]]], dtype=torch.int64, device=device)
    rows = torch.zeros(1, 1, 2, 4, dtype=torch.float32, device=device)
    triton.gather_rows(triton.page_addresses([page], device), slots, None, rows, 16)
    if not torch.equal(rows, page[:, :, [3, 1]]):
        raise WrongKernelError("the kernel that gathers rows returned other rows")


def _examine_kernels(device: str, check: bool) -> Kernels:
    try:
        attention, reason = explain_kernel(device)
        with _silence():
            coding = choose_coding_kernel(torch.empty(0, dtype=torch.float32, device=device))
    except ValueError as error:
        return Kernels(device, error=str(error))
    found = Kernels(device, attention, coding, reason)
    if not check:
        return found
    try:
        with _silence():
            return replace(found, check=check_attention(torch.device(device)))
    except Exception as error:
        return replace(found, error=_on_one_line(error))


def check_attention(device: torch.device) -> float:
    """
    Return the relative RMS error of decode attention over packed states against attention over the same states made
    dense; raise a `WrongKernelError` if rounding does not explain it.
    """
    cache = create_cache("gear-2bit")
    generator = torch.Generator().manual_seed(42)
    draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    keys, values = (draw(1, 2, 256, 64).to(device) for _ in range(2))
    query = draw(1, 4, 1, 64).to(device)
    with torch.inference_mode():
        cache.update(keys, values, 0)
        layer: LazyLayer = cache.layers[0]  # type: ignore[assignment]
        layer.commit_prompt()
        output = layer.attend(AttentionCall(query))
        dense = layer.to_dense("keys"), layer.to_dense("values")
        expected = F.scaled_dot_product_attention(query, *dense, enable_gqa=True)
    error = float(((output - expected).square().mean() / expected.square().mean()).sqrt())
    # NaN fails too
    if not error < _MAX_ERROR:
        raise WrongKernelError(f"attention over a compressed cache is wrong by {error:.1e}")
    return error


def _examine_models() -> list[ModelState]:
    states = []
    for name, model in PACKAGED_MODELS.items():
        version = model.installed_version()
        has_conversion = version is not None and is_converted(name, version)
        states.append(ModelState(name, model.distribution, version, model.hub_name, has_conversion))
    return states


def _examine_caches(packages: Sequence[Package]) -> list[CacheState]:
    broken = {package.name: package.detail for package in packages if package.status == "broken"}
    found: list[CacheState] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for entry in describe_caches():
            reason = None if entry.is_available else f"needs {entry.requires}"
            if reason is None and entry.requires is not None and entry.requires in broken:
                reason = f"{entry.requires} cannot be imported: {broken[entry.requires]}"
            found.append(CacheState(entry.name, reason is None, reason))
    # The registry warns of third parties' caches that fail to load
    skipped = [str(warning.message) for warning in caught if str(warning.message).startswith("Skipped: ")]
    return found + [CacheState(None, False, each.removeprefix("Skipped: ")) for each in skipped]


def _merge(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings with the same advice; errors come first."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        if before := merged.get(finding.advice):
            severity = min(before.severity, finding.severity)
            finding = Finding(severity, f"{before.what}; {finding.what}", finding.advice)
        merged[finding.advice] = finding
    return sorted(merged.values(), key=lambda finding: finding.severity)


def _package_findings(packages: Sequence[Package]) -> Iterator[Finding]:
    for package in packages:
        if package.advice is not None:
            is_required = package.needed_for == REQUIRED
            what = f"{package.name} is broken: " if package.status == "broken" else ""
            what += f"{package.detail}" if is_required else f"{package.detail} ({package.needed_for})"
            yield Finding("error" if is_required else "hint", what, package.advice)


def _serving_findings() -> Iterator[Finding]:
    if not import_utils.is_serve_available():
        what = "packages of Transformers' server are not installed (`kvcache-plugins serve`)"
        yield Finding("hint", what, "pip install '.[serving]' in a clone of the repository")


def _kernel_findings(kernels: Sequence[Kernels], triton: TritonState) -> Iterator[Finding]:
    for kernel in kernels:
        if kernel.error is not None:
            what = f"attention on {kernel.device} does not work: {kernel.error}"
            yield Finding("error", what, "KVCACHE_PLUGINS_KERNELS=torch does without kernels")
        elif kernel.reason is not None:
            what = f"attention on {kernel.device} runs in plain PyTorch, which is slower: {kernel.reason}"
            advice = "pip install triton" if kernel.device != "cpu" else "python -m kvcache_plugins.kernels.build"
            yield Finding("hint", what, advice if requested_kernel() == "auto" else "unset KVCACHE_PLUGINS_KERNELS")
    if triton.status == "fails":
        is_chosen = any("triton" in (kernel.attention, kernel.coding) for kernel in kernels)
        advice = "Triton needs a C compiler (gcc or clang, or CC) and Python's headers; "
        advice += "KVCACHE_PLUGINS_KERNELS=torch does without Triton"
        yield Finding("error" if is_chosen else "hint", f"Triton kernels do not run: {triton.detail}", advice)


def _model_findings(models: Sequence[ModelState]) -> Iterator[Finding]:
    for model in models:
        if model.version is None:
            what = f"{model.name} is not installed: it would come from the hub, as {model.hub_name}"
            yield Finding("hint", what, PACKAGED_MODELS[model.name].install)
