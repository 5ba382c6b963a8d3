"""What `kvcache-plugins doctor` finds: versions, devices, kernels, models, and what to do about what is missing.

Packages come from the project's own requirements, kernels from `kernels.engine`, caches from the registry: nothing is
listed here that could differ from what the package really asks for. Optional packages are imported to see whether they
can be; whatever they raise is a finding, not an error.

The package can work unless there is an error: a required package that is missing, broken or of a version that is not
supported, or a kernel that would be chosen and cannot run. An optional package that is missing or broken is a hint.
"""

import os
import platform
import warnings
from dataclasses import asdict
from importlib import metadata

import torch

from kvcache_plugins.gear.kernel_check import MismatchError, require_close_layers
from kvcache_plugins.kernels.engine import choose_coding_kernel, explain_kernel
from kvcache_plugins.models.packaged_models import PACKAGED_MODELS
from kvcache_plugins.models.reference_model import converted_folder
from kvcache_plugins.registry import create_cache, describe_caches

from .findings import find_in_kernels, find_in_models, find_in_packages, merge
from .machine import COMPILERS, count_threads, find_compiler, find_gpus, find_kernel_caches
from .packages import DISTRIBUTION, Package, error_of, find_packages, silence


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
    """Whether a kernel of this project's runs: `runs`, `interpreted`, `unused`, `missing` or `fails`."""
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
    """What computes on a device, and why it is less than what was wanted or cannot run at all."""
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
