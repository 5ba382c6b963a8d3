"""Commands of `kvcache-plugins`.

A command is a function whose signature declares its options and whose docstring is its help: in a module here, or
where it measures, in `kvcache_plugins.eval`. Help imports neither Torch nor Transformers: see `console.commands`.
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
