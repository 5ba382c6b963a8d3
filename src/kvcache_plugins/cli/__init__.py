"""The commands of `kvcache-plugins`: their options and help, and what of a command is neither measuring nor drawing.

A module holds one command. It imports what it needs in the function that runs, so that help needs neither Torch nor
Transformers; `console.lazy_group` says how. What exit codes mean stands in `console.command_group`.
"""

import sys
from typing import TYPE_CHECKING

from kvcache_plugins.console.interrupts import INTERRUPTED, end_at_interrupt, end_at_once
from kvcache_plugins.lazy_imports import lazy_attributes


if TYPE_CHECKING:
    from .root import app


__all__ = ["app", "main"]

__getattr__, __dir__ = lazy_attributes(__name__, {"app": "kvcache_plugins.cli.root:app"})


def main() -> None:
    """The console script: Ctrl-C is one line from here on, while what it needs is imported too."""
    end_at_interrupt()
    try:
        from .root import app

        app()
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)
    finally:
        end_at_once()
