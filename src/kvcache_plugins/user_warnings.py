"""Warnings that point at the user's own line of code, which may be any number of calls above the cache."""

import sys
import warnings


# Packages between a user and a cache. PEFT and Accelerate call the model on the user's behalf
_BETWEEN = {"kvcache_plugins", "transformers", "torch", "accelerate", "peft", "contextlib", "functools"}
# Parts of this package that use caches themselves
_COMMANDS = "kvcache_plugins.cli", "kvcache_plugins.eval"


def warn_user(message: str) -> None:
    """Warn at the innermost line outside the packages between a user and a cache."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message,
        UserWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=names.get("__name__", "__main__"),
        registry=registry,
    )


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in _BETWEEN and not module.startswith(_COMMANDS)
