"""A bar is shown for what takes long, and a process that died with the lock of all bars holds up nothing else."""

import subprocess
import sys

from kvcache_plugins.prompt_store import patience


# In a process of its own, as the lock is never given back
KILLED_WITH_THE_LOCK = """
import os, signal
from tqdm import tqdm
from kvcache_plugins.prompt_store.patience import with_patience

lock = tqdm.get_lock()
child = os.fork()
if child == 0:
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
assert list(with_patience(range(5), "Loading")) == [0, 1, 2, 3, 4]
"""


def test_another_process_that_was_killed_holds_up_nothing() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", KILLED_WITH_THE_LOCK], capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_what_takes_long_has_a_bar(monkeypatch, capsys) -> None:
    assert list(patience.with_patience([], "Loading")) == []
    assert list(patience.with_patience(range(3), "Loading")) == [0, 1, 2]
    assert "Loading" not in capsys.readouterr().err
    monkeypatch.setattr(patience, "_PATIENCE_S", 0.0)
    # Tests of commands may have turned bars off
    monkeypatch.setattr(patience.logging, "_tqdm_active", True)
    assert list(patience.with_patience(range(3), "Loading")) == [0, 1, 2]
    assert "Loading" in capsys.readouterr().err
