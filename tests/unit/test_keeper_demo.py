"""Parts of the demo of keepers; ``tests/crash/test_keeper_demo.py`` runs all of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.app import run as run_command
from holdfast.cli.demo.hosts import HOSTS, Hosts
from holdfast.cli.demo.keepers import Accident, Outcome

LOST = Accident("one host lost", 23, ("b",), 23, "parity")


def outcome(step: int | None = 23, **tiers: int) -> Outcome:
    """Return an outcome of :data:`LOST`."""
    return Outcome(LOST, step, tiers, 0.25, 12.0)


@pytest.mark.parametrize(
    "found",
    [outcome(20, parity=1), outcome(23, own=1), outcome(None)],
    ids=["step", "tier", "none"],
)
def test_unexpected_step_or_tier_is_noticed(found: Outcome) -> None:
    """A job that resumes from an earlier step, or from another tier, is not as expected."""
    assert outcome(23, parity=1).as_expected
    assert not found.as_expected


@pytest.fixture
def base() -> Iterator[Path]:
    """Make a folder for keepers with a short path."""
    with tempfile.TemporaryDirectory(prefix="hk") as folder:
        yield Path(folder)


@pytest.fixture
def sleeper(base: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process like one that a job of the demo with ``base`` left behind."""
    environment = os.environ | {"HOLDFAST_KEEPER_DIR": str(base / "b")}
    code = "import time; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # its environment is there to be read
            yield process
        finally:
            process.kill()


def test_leftover_processes_are_ended(base: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Processes of the demo are known by their environment. A folder with a similar name is another
    demo's."""
    (base / "other").mkdir()
    Hosts(base / "other").end()
    assert sleeper.poll() is None
    Hosts(base).end()
    assert sleeper.wait(50) == -9


def test_lost_host_is_replaced_by_an_empty_one(base: Path) -> None:
    """Its folder is empty and private; those of other hosts are unchanged."""
    hosts = Hosts(base)
    for name in HOSTS:
        (base / name / "something").touch()
    hosts.lose(["b"])
    assert [name for name in HOSTS if list((base / name).iterdir())] == ["a", "c", "d"]
    assert (base / "b").stat().st_mode & 0o777 == 0o700


def test_a_folder_or_storage_that_the_demo_cannot_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so before anything starts."""
    with pytest.raises(holdfast.UsageError, match="TMPDIR"):
        Hosts(tmp_path / ("x" * 100))
    assert run_command(["keeper", "demo", "memory://x"]) == 2
    assert "share no memory:// storage" in capsys.readouterr().err
