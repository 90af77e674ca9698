"""Test that ``make gpu`` fails if a part of it fails, however that part ends."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import run


def part(code: str, limit_s: float = 30.0) -> bool:
    """Return whether a process of Python that runs ``code`` counts as a success."""
    return run.run_part("a part", [sys.executable, "-S", "-c", code], os.environ, limit_s)


@pytest.mark.parametrize("code", ["import os; os.kill(os.getpid(), 9)", "exit(5)"])
def test_part_that_fails_or_is_killed_is_no_success(code):
    """A process that dies from a signal has a negative code."""
    assert not part(code)
    assert part("")


def test_part_that_hangs_ends_with_all_its_processes(tmp_path, monkeypatch):
    """A part that ignores the interruption is killed; its child holds a lock while it lives."""
    monkeypatch.setattr(run, "INTERRUPTED_S", 0.1)
    path = tmp_path / "lock"
    code = (
        "import fcntl, os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"lock = open({str(path)!r}, 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "os.fork()\n"
        "signal.pause()\n"
    )
    assert not part(code, 0.7)
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.parametrize("how", run.ENDING)
def test_signal_to_a_run_ends_its_part(tmp_path, how):
    """The part is interrupted and writes its results, even where a shell makes SIGINT ignored."""
    path = tmp_path / "result"
    part_code = (
        "import time\n"
        "print('begun', flush=True)\n"
        "try:\n    time.sleep(60)\n"
        f"except KeyboardInterrupt:\n    open({str(path)!r}, 'w').write('whole')\n"
    )
    code = (
        "import os, signal, sys, run\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"signal.signal({int(how)}, signal.SIG_DFL)  # nohup ignores SIGHUP\n"
        "run.interrupt_on_signals()\n"
        f"run.run_part('a part', [sys.executable, '-S', '-c', {part_code!r}], os.environ, 60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        cwd=Path(run.__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"== a part\n"
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(how)
        assert process.wait(30) != 0
    assert path.read_text() == "whole"
