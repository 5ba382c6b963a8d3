"""Commands of `kvcache-plugins`.

A command is a function, here or in `kvcache_plugins.eval`. Its signature declares the options, its docstring is the
help. Help imports neither Torch nor Transformers: see `console.commands`.
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
    """Run the console script. Ctrl-C prints one line, also during imports."""
    end_at_interrupt()
    try:
        from .root import app

        app()
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)
    finally:
        end_at_once()
