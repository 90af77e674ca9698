"""The complete ``holdfast keeper demo``: its output is true, and it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.drill, pytest.mark.timeout(420)]

PROGRAM = "import sys, holdfast.cli as cli; sys.argv[0] = 'holdfast'; cli.main()"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Return an empty folder for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hd") as folder:
        yield Path(folder)


def begin(scratch: Path) -> subprocess.Popen[str]:
    """Start the demo, with the folder for its temporary files."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "keeper", "demo"],
        env=os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes(scratch: Path) -> list[int]:
    """Return the processes started with a keeper folder below ``scratch``."""
    wanted = f"HOLDFAST_KEEPER_DIR={scratch}/".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def test_each_job_goes_on_with_what_there_is(scratch: Path) -> None:
    """Jobs resume from the memory of keepers, from parity, and from storage, with the losses of an
    uninterrupted run."""
    with begin(scratch) as demo:
        out, err = demo.communicate(timeout=400)
    assert demo.returncode == 0, err
    assert "all 40 losses are exactly those of an uninterrupted run" in out
    rows = re.findall(
        r"^  (all trainers|one host|two hosts|all hosts) \w+ +(\d+) +(\d+) +(\d+) ", out, re.M
    )
    assert [int(lost) for *_, lost in rows] == [0, 0, 0, 5]
    assert processes(scratch) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_nothing_is_left_of_a_demo_that_is_interrupted(
    scratch: Path, number: signal.Signals
) -> None:
    """It ends in the middle of the second job, without keepers, trainers or a folder."""
    with begin(scratch) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "their keepers live on" in line:
                break
        assert len(processes(scratch)) >= 4
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)  # as a terminal does
        else:
            demo.send_signal(number)
        _, err = demo.communicate(timeout=100)
    assert demo.returncode == 128 + number, err
    assert processes(scratch) == []
    assert list(scratch.iterdir()) == []
