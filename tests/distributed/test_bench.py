"""``holdfast bench`` with several ranks of this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A shell's background jobs and their children ignore SIGINT unless a handler is set.
BENCH = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from holdfast.cli import main; main()",
    "bench",
]


@pytest.mark.nightly(13)
def test_ranks_of_this_host_need_no_launcher(tmp_path: Path) -> None:
    """``--ranks`` starts them. All save different parts of one state."""
    command = [*BENCH, tmp_path, "--size", "4MiB", "--runs", "1", "--ranks", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    (save,) = [phase for phase in document["phases"] if phase["name"] == "save"]
    assert document["config"]["ranks"] == 2
    assert save["operations"]["write"]["nbytes"] >= save["nbytes"]
    assert save["nbytes"] == document["config"]["nbytes"]
    assert "round 1: save: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_all_of_them(tmp_path: Path) -> None:
    """The message is that of the failed rank, not of those that waited. Nothing is left."""
    environment = os.environ | {"HOLDFAST_FILE_MAX_CONCURRENCY": "none"}
    command = [*BENCH, tmp_path, "--size", "4MiB", "--runs", "1", "--ranks", "2"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert "MAX_CONCURRENCY" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly(16)
def test_interrupted_ranks_leave_nothing(tmp_path: Path) -> None:
    """A SIGTERM in the middle of a round leaves neither files nor processes."""
    command = [*BENCH, tmp_path, "--size", "16MiB", "--runs", "1000", "--ranks", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("round 1" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.endswith("holdfast: interrupted\n")
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert str(tmp_path).encode() not in b"\n".join(commands)
