"""Prompts in the folder of a store: listed, checked and removed, for `kvcache-plugins store`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from kvcache_plugins.files.records import read_content
from kvcache_plugins.files.schema import unpack

from .blocks import FORMAT, BlockHeader, read_block
from .folder import StoredFile, StoreFolder


class StoredPrompt(TypedDict):
    """
    A prompt in a folder, named by its last block.

    Attributes:
        key (`str`): key of the last block.
        model_name (`str`): name of the model.
        options (`dict`): class and options of the cache.
        num_tokens, num_blocks (`int`): tokens and blocks up to the end of the last block.
        num_missing (`int`): blocks that were evicted; those after them cannot be loaded.
        num_bytes (`int`): bytes of the files, which other prompts may share.
        used_at (`float`): time of the last use, in seconds since 1970.
    """

    key: str
    model_name: str
    options: dict[str, object]
    num_tokens: int
    num_blocks: int
    num_missing: int
    num_bytes: int
    used_at: float


def list_prompts(path: Path) -> list[StoredPrompt]:
    """List the prompts in a folder, the most recently used first, without files that cannot be read."""
    folder = _open(path)
    headers: dict[str, BlockHeader] = {}
    with folder.locked():
        files = {file.path.stem: file for file in folder.files()}
        for key, file in files.items():
            with suppress(ValueError, OSError):
                content = read_content(file.path, FORMAT)
                content.pop("layers", None)
                headers[key] = unpack(BlockHeader, content)
    followed = {header.previous for header in headers.values()}
    prompts = [_describe(key, headers, files) for key in headers.keys() - followed]
    return sorted(prompts, key=lambda prompt: prompt["used_at"], reverse=True)


def find_damaged(path: Path, *, remove: bool = False) -> dict[Path, str]:
    """Find the files of a folder that cannot be read, each with the reason, and remove them if asked to."""
    folder = _open(path)
    damaged: dict[Path, str] = {}
    with folder.locked(writing=remove):
        for file in folder.files():
            try:
                read_block(file.path)
            except ValueError as error:
                damaged[file.path] = str(error)
        if remove:
            for each in damaged:
                each.unlink(missing_ok=True)
            folder.sweep()
    return damaged


def clear(path: Path) -> tuple[int, int]:
    """Remove all blocks that are not in use; return their number and bytes."""
    folder = _open(path)
    with folder.locked(writing=True):
        folder.sweep()
        removed = {*folder.files()}
        folder.make_room(0, 0, ())
        removed -= {*folder.files()}
    return len(removed), sum(file.num_bytes for file in removed)


def _open(path: Path) -> StoreFolder:
    if not (path / "blocks").is_dir():
        raise ValueError(f"`store`: {path} is no folder of a prompt store; `generate --store {path}` makes one")
    return StoreFolder(path)


def _describe(key: str, headers: Mapping[str, BlockHeader], files: Mapping[str, StoredFile]) -> StoredPrompt:
    last, chain = headers[key], [key]
    # Starts decrease, so that forged files make no circle
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
        # Other prompts may have used the blocks before the last
        "used_at": files[key].used_at / 1e9,
    }
