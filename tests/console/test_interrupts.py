"""Ctrl-C at several moments of a command's life: one line and 130, whatever is being imported or done."""

import signal
import subprocess
import sys
import threading

import pytest

from kvcache_plugins.console.interrupts import INTERRUPTED, interrupts_are_ours


# Python says of each module when it is imported: so a moment is one for certain, however busy the machine is
COMMAND = [sys.executable, "-X", "importtime", "-m", "kvcache_plugins.cli"]
MOMENTS = {
    "typer": "typer",
    "the root": "kvcache_plugins.cli.root",
    "inside torch": "torch._C",
    "late in torch": "torch.nn.functional",
    "inside transformers": "transformers.utils.logging",
}


def interrupt_at(module: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and standard error of a command that gets Ctrl-C when `module` has been imported."""
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    said = []
    is_sent = False
    for line in process.stderr:
        if not line.startswith("import time:"):
            said.append(line)
        elif line.split("|")[-1].strip() == module and not is_sent:
            process.send_signal(signal.SIGINT)
            is_sent = True
    code = process.wait(timeout=120)
    assert is_sent, f"{module} was never imported"
    return code, said


@pytest.mark.parametrize("module", MOMENTS.values(), ids=MOMENTS)
def test_while_modules_are_imported(module: str) -> None:
    code, said = interrupt_at(module, "doctor")
    assert (code, said) == (INTERRUPTED, ["Interrupted\n"])


# In a process of its own: a handler is a process's
IN_PYTHON = """
import os, signal, sys, time
from kvcache_plugins import cli
from kvcache_plugins.console import interrupts
{before}
interrupts.end_at_interrupt()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
except KeyboardInterrupt:
    print("closed")
{after}
"""


def run_python(before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    code = IN_PYTHON.format(before=before, after=after)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_outside_of_imports_what_is_open_is_closed() -> None:
    finished = run_python()
    assert (finished.returncode, finished.stdout) == (0, "closed\n")


def test_at_the_end_of_the_process() -> None:
    finished = run_python(after="interrupts.end_at_once()\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)")
    assert (finished.returncode, finished.stderr) == (INTERRUPTED, "Interrupted\n")


def test_a_process_that_ignores_it_still_does() -> None:
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep = lambda _: None"
    finished = run_python(before=ignoring, after="print('went on')")
    assert (finished.returncode, finished.stdout) == (0, "went on\n")


def test_processes_that_are_started_inside_ignore_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_are_ours():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before
    # Handlers belong to the main thread: in another nothing is touched
    seen = []

    def look() -> None:
        with interrupts_are_ours():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
