"""Locks of open files. A lock ends when the file is closed or the process ends.

POSIX systems lock a file by `flock`, which readers can share. On Windows one byte is locked, far behind all that is
written, so that others can read the file; such a lock is never shared: a reader excludes other readers too.
"""

import os
import time


_LOCKED_BYTE = 1 << 30
_SECONDS_BETWEEN_TRIES = 0.02


def lock(descriptor: int, *, is_shared: bool = False, is_waiting: bool = True) -> bool:
    """Lock an open file, exclusively or for readers. Return `False` if it is locked and `is_waiting` is false."""
    # Windows has no `fcntl`
    try:
        import fcntl
    except ImportError:
        return _lock_byte(descriptor, is_waiting)
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if is_waiting else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_byte(descriptor: int, is_waiting: bool) -> bool:
    import msvcrt

    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
                return True
            except PermissionError:
                if not is_waiting:
                    return False
            time.sleep(_SECONDS_BETWEEN_TRIES)
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
