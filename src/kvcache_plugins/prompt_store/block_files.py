"""A block of a prompt as a file: what it adds to a cache, its tokens, and the name of the block before it.

The file's own name follows from the last two, so a file that was damaged, renamed or put there by somebody else is
found out, whatever its checksum says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_plugins.files.document import Document
from kvcache_plugins.files.refusal import RefusedFile, refusals
from kvcache_plugins.files.tensor_file import read_tensor_file, write_tensor_file

from .block_keys import KEY_CHARACTERS, next_key
from .pieces import Piece, read_piece


FORMAT = "kvcache_plugins.prompt_block"
VERSION = 1
OWNER_ALONE = 0o600
_ADVICE = "the prompt is read again"


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PromptBlock:
    """
    A block as a file has it.

    Attributes:
        previous (`str`): name of the block before it, or of the prompt's root.
        start (`int`): position of its first token.
        token_ids (`list[int]`): its tokens.
        model_name (`str`): what the model was called.
        options (`dict`): those of the cache.
        piece (`Piece`): what it adds to a cache.
    """

    previous: str
    start: int
    token_ids: Sequence[int]
    model_name: str
    options: dict[str, Any]
    piece: Piece


def write_block(path: Path, block: PromptBlock) -> None:
    """Writes a block, whole or not at all, for its owner alone."""
    content = {
        "previous": block.previous,
        "start": block.start,
        "token_ids": list(block.token_ids),
        "model_name": block.model_name,
        "options": block.options,
        "layers": block.piece.layers,
    }
    write_tensor_file(path, FORMAT, VERSION, content, block.piece.tensors, mode=OWNER_ALONE)


def read_block(path: Path) -> PromptBlock:
    """
    The block in a file.

    Raises:
        ValueError: naming the file, if it is damaged, of another version, or another block's.
    """
    with refusals("folder", path):
        document, tensors = read_tensor_file(path, FORMAT, VERSION, _ADVICE)
        previous, token_ids = document.text("previous"), document.integers("token_ids")
        is_name = len(previous) == KEY_CHARACTERS and set(previous) <= set("0123456789abcdef")
        if not is_name or next_key(previous, token_ids) != path.stem:
            raise RefusedFile("holds another block than its name says")
        block = PromptBlock(
            previous=previous,
            start=document.integer("start"),
            token_ids=token_ids,
            model_name=document.text("model_name"),
            options=_options(document.inner("options")),
            piece=read_piece(document.rows("layers"), tensors),
        )
        document.finish()
    return block


def _options(document: Document) -> dict[str, Any]:
    return {name: document.take(name) for name in document.names()}
