"""Prompts that were read once, compressed, on disk: no process reads their beginnings again.

`store` has the class, `block_keys` says what a block is called, `cache` is the GEAR cache that knows which blocks it
was fed, `pieces` takes a cache apart and puts it together, `block_files` writes and reads, `kept_blocks` goes on
whatever happens to a file, `folder` says who may do what when, and what goes when room is short.
"""

from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes


if TYPE_CHECKING:
    from .store import PromptStore


__all__ = ["PromptStore"]

__getattr__, __dir__ = lazy_attributes(__name__, {"PromptStore": "kvcache_plugins.prompt_store.store:PromptStore"})
