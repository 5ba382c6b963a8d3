"""How `kvcache-plugins doctor` shows what `doctor.examine` finds: what is there, then what to do."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from .tables import make_table, open_console


def print_report(report: Mapping[str, Any]) -> None:
    """
    Prints a report.

    Args:
        report (`Mapping[str, Any]`): What `doctor.examine` returns.
    """
    console = open_console()
    title = f"kvcache-plugins {report['version']}"
    columns = {"package": "name", "version": "name", "needed for": "name", "state": "name"}
    cells = [
        [each["name"], each["version"] or "-", each["needed_for"], each["detail"] or "ok"]
        for each in report["packages"]
    ]
    console.print(make_table(title, columns, cells))
    rows = [*_machine(report), *_kernels(report), *_models(report), *_caches(report)]
    console.print(make_table("This machine", {"what": "name", "found": "name"}, rows))
    _print_findings(console, report)


def _machine(report: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    gpus = [
        f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, capability {gpu['capability']}"
        for gpu in report["gpus"]
    ]
    threads = report["threads"]
    settings = [f"{name}={value}" for name, value in report["settings"].items() if value is not None]
    compilers = [
        (f"{language} compiler", "none" if each is None else f"{each['path']}: {each['version']}")
        for language, each in report["compilers"].items()
    ]
    return [
        ("system", f"Python {report['python']}, {report['platform']}"),
        ("GPU", "; ".join(gpus) or "none that torch finds"),
        ("threads", f"{threads['torch']} of torch, on {threads['usable_cores'] or threads['cores']} cores"),
        *compilers,
        ("environment", " ".join(settings) or "nothing set"),
    ]


def _kernels(report: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    triton = report["triton"]
    rows = [("Triton", triton["status"] if triton["detail"] is None else f"{triton['status']}: {triton['detail']}")]
    for each in report["kernels"]:
        found = f"attention by {each['attention']}, coding by {each['coding']}"
        if each["check"] is not None:
            found += f"; agrees with plain PyTorch within {each['check']:.0e}"
        rows.append((f"kernels on {each['device']}", f"fails: {each['error']}" if each["error"] else found))
    for name, each in report["kernel_caches"].items():
        kept = f"{each['num_kernels']} in {each['folder']}" if each["num_kernels"] else "none yet: first use compiles"
        rows.append((f"{name} kernels kept", kept))
    return rows


def _models(report: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    rows = []
    for each in report["models"]:
        state = "converted" if each["is_converted"] else "converted at first use"
        found = f"{each['package']} {each['version']}, {state}" if each["version"] else "from the hub"
        rows.append((f"model {each['name']}", found))
    return rows


def _caches(report: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    usable = [each for each in report["caches"] if each["is_usable"]]
    refused = [
        (f"cache {each['name'] or '(unnamed)'}", f"cannot be used: {each['reason']}")
        for each in report["caches"]
        if not each["is_usable"]
    ]
    return [("caches", f"{len(usable)} of {len(report['caches'])} can be used"), *refused]


def _print_findings(console: Console, report: Mapping[str, Any]) -> None:
    for finding in report["findings"]:
        console.print(f"{finding['severity']}: {finding['what']}", markup=False, soft_wrap=True)
        console.print(f"    {finding['advice']}", markup=False, soft_wrap=True)
    verdict = "Everything that is needed works" if report["works"] else "Not everything that is needed works"
    if report["works"] and report["findings"]:
        verdict += "; what is said above concerns options"
    console.print(f"{verdict}.", style="bold", markup=False)
