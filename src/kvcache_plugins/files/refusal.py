"""How a file that cannot be used is refused: by one `ValueError`, which names it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class RefusedFile(ValueError):
    """What is wrong with a file as a whole: the rest of a sentence that begins with its name."""


@contextmanager
def refusals(option: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """
    Whatever is found wrong inside becomes one `ValueError`.

    Args:
        option (`str`): the option that the file was given as.
        path (`str` or `os.PathLike`): the file.

    Raises:
        ValueError: for every `ValueError` and `OSError` inside, naming option and file.
    """
    try:
        if not os.path.isfile(path):
            raise ValueError(f"`{option}`: there is no file {path}")
    except ValueError as error:
        # A path with a zero byte too
        raise ValueError(f"`{option}`: there is no file {path}") from error
    try:
        yield
    except RefusedFile as error:
        raise ValueError(f"`{option}`: {path} {error}") from error
    except ValueError as error:
        raise ValueError(f"`{option}`: {path} is damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"`{option}`: {path} cannot be read: {error.strerror}") from error
