"""Inspection of a store's folder: prompts by their last blocks, and their removal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcache_plugins.files.records import read_content
from kvcache_plugins.files.schema import unpack

from .blocks import FORMAT, BlockHeader
from .folder import StoredFile, StoreFolder


def list_prompts(path: Path) -> list[dict[str, Any]]:
    """
    Lists the prompts in a folder by their last blocks, those that were used last first; files that cannot be read are
    left out. Of a prompt `num_missing` blocks are gone, so what follows cannot be loaded; some of its bytes other
    prompts may share; `used_at` is in seconds since 1970.
    """
    folder = _existing(path)
    with folder.locked():
        files = {file.path.stem: file for file in folder.files()}
        headers = {key: header for key, file in files.items() if (header := _read_header(file)) is not None}
    followed = {header.previous for header in headers.values()}
    prompts = [_prompt_of(key, headers, files) for key in headers.keys() - followed]
    return sorted(prompts, key=lambda prompt: prompt["used_at"], reverse=True)


def clear(path: Path) -> tuple[int, int]:
    """Removes all blocks but those that are in use; returns how many and their bytes."""
    folder = _existing(path)
    with folder.locked(writing=True):
        folder.sweep()
        removed = {*folder.files()}
        folder.make_room(0, 0, ())
        removed -= {*folder.files()}
    return len(removed), sum(file.num_bytes for file in removed)


def _existing(path: Path) -> StoreFolder:
    if not (path / "blocks").is_dir():
        raise ValueError(f"`store`: {path} is no folder of a prompt store")
    return StoreFolder(path)


def _read_header(file: StoredFile) -> BlockHeader | None:
    try:
        content = read_content(file.path, FORMAT)
        content.pop("layers", None)
        return unpack(BlockHeader, content)
    except (ValueError, OSError):
        return None


def _prompt_of(key: str, headers: dict[str, BlockHeader], files: dict[str, StoredFile]) -> dict[str, Any]:
    last, chain = headers[key], [key]
    while (previous := headers[chain[-1]].previous) in headers and headers[previous].start < headers[chain[-1]].start:
        chain.append(previous)
    num_blocks = last.start // max(len(last.token_ids), 1) + 1
    return {
        "key": key,
        "model_name": last.model_name,
        "options": last.options,
        "num_tokens": last.start + len(last.token_ids),
        "num_blocks": num_blocks,
        "num_missing": max(num_blocks - len(chain), 0),
        "num_bytes": sum(files[each].num_bytes for each in chain),
        # Others may use the blocks before it
        "used_at": files[key].used_at / 1e9,
    }
