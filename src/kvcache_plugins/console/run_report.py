"""Provenance that every evaluation writes beside its numbers: commit, date, device and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch

    from kvcache_plugins.reports.memory import MemoryReport


def provenance(device: torch.device) -> dict[str, object]:
    """Commit, date, device and versions behind a number."""
    # What compiles the kernels of a GPU
    names = ("torch", "transformers", *(["triton"] if device.type == "cuda" else []))
    versions = {name: metadata.version(name) for name in names}
    return {
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": _device_name(device),
        "versions": {
            "python": platform.python_version(),
            **versions,
            "kvcache_plugins": metadata.version("kvcache-plugins"),
        },
    }


def _commit() -> str | None:
    """
    The checkout's commit, marked where tracked files differ from it. For an installed package what
    `KVCACHE_PLUGINS_COMMIT` says, marked as told, else `None`.
    """
    here = Path(__file__).resolve()
    # An installed package may lie in a folder of some other repository, whose commit would say nothing about it
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        told = os.environ.get("KVCACHE_PLUGINS_COMMIT")
        return f"{told} (told)" if told else None
    commit = _git(here.parent, "rev-parse", "--short=12", "HEAD")
    has_changes = bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no"))
    return f"{commit}-modified" if commit and has_changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return str(device)


def memory_fields(memory: MemoryReport) -> dict[str, object]:
    """A `MemoryReport` for a JSON file."""
    return {
        "total_bytes": memory.total_bytes,
        "dense_bytes": memory.dense_bytes,
        "parts": memory.parts,
        "devices": memory.devices,
        "kv_percent": memory.kv_percent,
        "shared": memory.shared,
        "kv_percent_with_shared": memory.kv_percent_with_shared,
        "compression_ratio": memory.compression_ratio,
        "bits_per_value": memory.bits_per_value,
    }


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes an indented JSON file, its folder made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
