"""Files that are written completely or not at all, and refused by one `ValueError` that names them."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO


class RefusedFile(ValueError):
    """Refusal of a file as a whole. The message continues a sentence that begins with the file's name."""


@contextmanager
def refusals(option: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every `ValueError` and `OSError` inside into one `ValueError` that names the option and its file."""
    # False for a path with a zero byte too, for which `os.path` may raise
    if not Path(path).is_file():
        raise ValueError(f"`{option}`: there is no file {path}")
    try:
        yield
    except RefusedFile as error:
        raise ValueError(f"`{option}`: {path} {error}") from error
    except ValueError as error:
        raise ValueError(f"`{option}`: {path} is damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"`{option}`: {path} cannot be read: {error.strerror}") from error


@contextmanager
def new_file(path: str | os.PathLike[str], mode: int | None = None) -> Iterator[BinaryIO]:
    """
    Open a file that replaces the one at `path` when the block ends without an error. Readers see the old file or the
    new one, and after a full disk or a killed process the old one. Permissions are `mode`, or those of the old file.
    Raise an `OSError` that names `path` if it cannot be written, and a `ValueError` for a folder or a device.
    """
    # A link stays; its target is replaced
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise ValueError(f"`path`: {os.fspath(path)} is no file, and cannot be replaced by one")
    temporary = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.tmp")
    try:
        # Not by `tempfile`, whose files only their owner can read
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
        # The error names the temporary file
        raise OSError(error.errno, f"cannot be written: {error.strerror}", os.fspath(path)) from error
