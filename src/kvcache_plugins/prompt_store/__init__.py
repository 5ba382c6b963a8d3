"""Prompts that were read once, compressed, on disk: no process reads their beginnings again.

`store` has the class and lists what is there, `blocks` names a block of a prompt, cuts it out of a cache and makes a
cache of blocks, `folder` says who may do what when and which blocks go when the folder is full.
"""

from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes


if TYPE_CHECKING:
    from .store import PromptStore


__all__ = ["PromptStore"]

__getattr__, __dir__ = lazy_attributes(__name__, {"PromptStore": "kvcache_plugins.prompt_store.store:PromptStore"})
