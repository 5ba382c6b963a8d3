"""A bar for what takes long, and nothing of it for what does not.

tqdm's bars share a lock with all processes that are forked from this one. A process that is killed while it makes a
bar never gives it back, and whoever asks for it then waits for ever. So none is made before it is of use.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from transformers.utils import logging


# Seconds after which a bar is shown
_PATIENCE_S = 2.0

Item = TypeVar("Item")


def with_patience(blocks: Sequence[Item], description: str) -> Iterator[Item]:
    """The blocks one by one; those that are left after two seconds with a bar of that description."""
    started, bar = time.perf_counter(), None
    try:
        for number, block in enumerate(blocks):
            if bar is None and time.perf_counter() - started > _PATIENCE_S:
                bar = logging.tqdm(total=len(blocks), initial=number, desc=description, unit="block", leave=False)
            yield block
            if bar is not None:
                bar.update()
    finally:
        if bar is not None:
            bar.close()
