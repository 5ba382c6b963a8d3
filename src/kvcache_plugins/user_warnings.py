"""Warnings that name the line of whoever uses a cache: it lies an unknown number of calls of others further up."""

import sys
import warnings


# What stands between users and caches; PEFT and Accelerate call the model in a user's place
_BETWEEN = {"kvcache_plugins", "transformers", "torch", "accelerate", "peft", "contextlib", "functools"}
# Users of caches themselves
_COMMANDS = "kvcache_plugins.cli", "kvcache_plugins.eval"


def warn_user(message: str) -> None:
    """Warn of something, at the newest line outside this package and those that call it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "__main__")
    warnings.warn_explicit(message, UserWarning, *place, registry=registry)


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in _BETWEEN and not module.startswith(_COMMANDS)
