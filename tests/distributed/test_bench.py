"""``holdfast bench`` with several ranks of this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.bench_job import HOLDFAST, assert_interrupted_cleanly

SIZE = ["--size", "4MiB", "--runs", "1"]


def by_name(document: dict[str, Any]) -> dict[str, Any]:
    """The phases of a result."""
    return {phase["name"]: phase for phase in document["phases"]}


@pytest.mark.nightly(13)
def test_ranks_of_this_host_need_no_launcher(tmp_path: Path) -> None:
    """``--ranks`` starts them; all save different parts of one state."""
    command = [*HOLDFAST, "bench", tmp_path, *SIZE, "--ranks", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    save = by_name(document)["save"]
    assert document["config"]["ranks"] == 2
    assert save["operations"]["write"]["nbytes"] >= save["nbytes"]
    assert save["nbytes"] == document["config"]["nbytes"]
    assert "round 1: save: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_all_of_them(tmp_path: Path) -> None:
    """With its own message, not with that of the ranks that waited for it; nothing is left."""
    environment = os.environ | {"HOLDFAST_FILE_MAX_CONCURRENCY": "none"}
    command = [*HOLDFAST, "bench", tmp_path, *SIZE, "--ranks", "2"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert "MAX_CONCURRENCY" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly(16)
def test_interrupted_ranks_leave_nothing(tmp_path: Path) -> None:
    """Neither files nor processes, after a SIGTERM in the middle of a round."""
    assert_interrupted_cleanly(tmp_path, "--ranks", "2", how=signal.SIGTERM)
    assert str(tmp_path) not in _commands()


def _commands() -> str:
    """The command lines of all processes of this host."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return b"\n".join(lines).decode(errors="replace")
