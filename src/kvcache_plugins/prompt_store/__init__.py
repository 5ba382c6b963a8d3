"""Compressed prompts on disk: no process reads their beginnings again.

`store` has the class, `blocks` names blocks and reads their files, `prompt_cache` cuts blocks out of a cache and makes
a cache of blocks, `folder` locks files and evicts blocks, and `maintenance` lists, checks and removes prompts.
"""

from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes


if TYPE_CHECKING:
    from .store import PromptStore


__all__ = ["PromptStore"]

__getattr__, __dir__ = lazy_attributes(__name__, {"PromptStore": "kvcache_plugins.prompt_store.store:PromptStore"})
