"""Where machine code is kept from one process to the next.

Numba keeps the code of each function and makes it anew if the function's own file has changed. What it has taken in
from other files it does not look at, so that after an update a function could go on with another one's old code. Hence
all of it stands in a folder that is named after all sources of `ops`, whose constants are compiled in too.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba


# Attributes that Numba makes at run time
config: Any = numba.config
_PREFIX = "machine-code-"


@contextmanager
def kept_beside(package: Path) -> Iterator[None]:
    """
    Functions that are decorated inside are kept in a folder for the present sources of `package`: within
    `NUMBA_CACHE_DIR` if that is set, or else within the package's `__pycache__`. Where neither can be written, Numba
    chooses, and the folder is the user's.
    """
    before = config.CACHE_DIR
    folder = Path(before or package / "__pycache__") / f"{_PREFIX}{_digest(package)}"
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            yield
            return
        for old in folder.parent.glob(f"{_PREFIX}*"):
            if old != folder and not before:
                shutil.rmtree(old, ignore_errors=True)
    if not os.access(folder, os.W_OK):
        yield
        return
    # What the variable sets; read by Numba when a function is decorated
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
