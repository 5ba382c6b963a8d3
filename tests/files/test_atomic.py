"""A file is written whole or not at all, with other writers and after any end of the writing."""

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcache_plugins.files.atomic import new_file


def write(path, content: bytes) -> None:
    with new_file(path) as file:
        file.write(content)


def test_writing_replaces_the_file_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "file"
    write(path, b"old")
    path.chmod(0o640)
    write(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "link"
    link.symlink_to(path)
    write(link, b"through the link")
    assert link.is_symlink() and path.read_bytes() == b"through the link"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write(path, b"old")
    with pytest.raises(KeyboardInterrupt), new_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_full_disk_leaves_the_old_file(tmp_path):
    """Limit the size of files in place of filling a disk."""
    path = tmp_path / "file"
    write(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"cannot be written.*{path}") as caught:
            write(path, bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_unwritable_paths_are_named(tmp_path):
    path = tmp_path / "nowhere" / "file"
    for where, error, message in (
        (path, FileNotFoundError, f"cannot be written.*{path}"),
        (tmp_path, ValueError, f"{tmp_path} is no file"),
        ("/dev/null", ValueError, "/dev/null is no file"),
        # No user may write there
        ("/proc/file", OSError, "cannot be written.*/proc/file"),
    ):
        with pytest.raises(error, match=message):
            write(where, b"")


def test_readers_see_whole_files_of_concurrent_writers(tmp_path):
    """Every read finds one writer's file, whole."""
    path, found = tmp_path / "file", set()
    contents = [bytes([number]) * 100_000 for number in range(4)]
    write(path, contents[0])
    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(lambda each: [write(path, each) for _ in range(20)], each) for each in contents]
        while not all(writer.done() for writer in writers):
            found.add(path.read_bytes())
    assert found <= set(contents) and os.listdir(tmp_path) == ["file"]
