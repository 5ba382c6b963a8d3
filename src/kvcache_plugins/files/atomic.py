"""Writing a file whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO


@contextmanager
def new_file(path: str | os.PathLike[str], mode: int | None = None) -> Iterator[BinaryIO]:
    """
    A file to write to, which takes its place at `path` when the block ends without an error.

    It stands in the same folder until then, under another name. So whoever reads sees the old file or the new one,
    the last of several writers wins, and a full disk or a killed process leaves the old one as it was.

    Args:
        path (`str` or `os.PathLike`): where the file goes.
        mode (`int`, *optional*): its permissions, from the start. By default those of what it replaces, or else of any
            new file.

    Raises:
        OSError: naming `path`, if it cannot be written.
        ValueError: if there is something at `path` that is no file, as a folder or a device.
    """
    # Where a link leads to: the link itself stays
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise ValueError(f"`path`: {os.fspath(path)} is no file, and cannot be replaced by one")
    temporary = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.tmp")
    try:
        # Made as any new file: what `tempfile` makes is its owner's alone
        opener = None if mode is None else partial(os.open, mode=mode)
        with open(temporary, "xb", opener=opener) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if mode is None:
                    with suppress(FileNotFoundError):
                        os.chmod(temporary, os.stat(target).st_mode & 0o777)
                os.replace(temporary, target)
            except BaseException:
                os.unlink(temporary)
                raise
    except OSError as error:
        # What failed was asked of another name
        raise OSError(error.errno, f"cannot be written: {error.strerror}", os.fspath(path)) from error
