"""What is in the folder of a store: prompts by their last blocks, damaged files, and how to be rid of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_plugins.files.refusal import refusals
from kvcache_plugins.files.tensor_file import read_document

from .block_files import FORMAT, VERSION, read_block
from .folder import StoredFile, StoreFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPrompt:
    """
    A prompt of which no longer one is there.

    Attributes:
        key (`str`): name of its last block.
        model_name (`str`): what the model was called.
        options (`dict`): those of the cache.
        num_tokens (`int`), num_blocks (`int`): how long it is.
        num_missing (`int`): those of its blocks that are not there, so that what follows them cannot be loaded.
        num_bytes (`int`): of its files, some of which other prompts may share.
        used_at (`float`): when it was used last, in seconds since 1970.
    """

    key: str
    model_name: str
    options: dict[str, Any]
    num_tokens: int
    num_blocks: int
    num_missing: int
    num_bytes: int
    used_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    file: StoredFile
    previous: str
    start: int
    num_tokens: int
    model_name: str
    options: dict[str, Any]


def list_prompts(path: Path) -> list[KeptPrompt]:
    """The prompts in a folder, those that were used last first; files that cannot be read are left out."""
    folder = _existing(path)
    with folder.reading():
        headers = {file.path.stem: header for file in folder.files() if (header := _read_header(file)) is not None}
    followed = {header.previous for header in headers.values()}
    prompts = [_prompt_of(key, headers) for key in headers.keys() - followed]
    return sorted(prompts, key=lambda prompt: prompt.used_at, reverse=True)


def find_prompt(path: Path, key: str) -> KeptPrompt:
    """
    The prompt whose name begins so.

    Raises:
        ValueError: if there is none, or several.
    """
    found = [prompt for prompt in list_prompts(path) if prompt.key.startswith(key)]
    if len(found) != 1:
        raise ValueError(f"`key`: {len(found)} prompts have a name that begins with {key!r}")
    return found[0]


def find_damaged(path: Path, *, remove: bool = False) -> dict[Path, str]:
    """
    The files of a folder that no cache is made of, each with what is wrong with it.

    Args:
        path (`Path`): the folder.
        remove (`bool`, *optional*, defaults to `False`): whether they go.
    """
    folder, damaged = _existing(path), {}
    with folder.writing() if remove else folder.reading():
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
    """Removes all blocks but those that are in use; returns how many and their bytes."""
    folder = _existing(path)
    with folder.writing():
        folder.sweep()
        files = folder.files()
        removed = folder.remove(file.path for file in files)
        left = sum(file.num_bytes for file in folder.files())
    return removed, sum(file.num_bytes for file in files) - left


def _existing(path: Path) -> StoreFolder:
    if not (path / "blocks").is_dir():
        raise ValueError(f"`store`: {path} is no folder of a prompt store")
    return StoreFolder(path)


def _read_header(file: StoredFile) -> _Header | None:
    try:
        with refusals("folder", file.path):
            document = read_document(file.path, FORMAT, VERSION, "clear the store")
            options = document.inner("options")
            return _Header(
                file=file,
                previous=document.text("previous"),
                start=document.integer("start"),
                num_tokens=len(document.integers("token_ids")),
                model_name=document.text("model_name"),
                options={name: options.take(name) for name in options.names()},
            )
    except ValueError:
        return None


def _prompt_of(key: str, headers: dict[str, _Header]) -> KeptPrompt:
    last = headers[key]
    chain, at = [last], last.previous
    while at in headers and headers[at].start < chain[-1].start:
        chain.append(headers[at])
        at = headers[at].previous
    num_blocks = last.start // max(last.num_tokens, 1) + 1
    return KeptPrompt(
        key=key,
        model_name=last.model_name,
        options=last.options,
        num_tokens=last.start + last.num_tokens,
        num_blocks=num_blocks,
        num_missing=max(num_blocks - len(chain), 0),
        num_bytes=sum(header.file.num_bytes for header in chain),
        # Others may use the blocks before it
        used_at=last.file.used_at / 1e9,
    )
