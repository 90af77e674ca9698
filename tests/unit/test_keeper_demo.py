"""The parts of the demo of keepers. The whole of it, with its processes, is run by ``make
demo-keeper``, and in tests/crash."""

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
from holdfast.cli.demo.aftermath import TITLES, Accident, Outcome, differences, outcome_of
from holdfast.cli.demo.hosts import HOSTS, Hosts
from holdfast.cli.demo.journal import Event
from holdfast.cli.demo.keepers import ACCIDENTS, EVERY, STEPS

LOST = Accident("one host lost", 23, ("b",), 23, "parity")


def resumed(rank: int, seconds: float, **tiers: int) -> Event:
    """Return the event of a rank that has resumed."""
    told = {"step": 23, "tier": "memory", "nbytes": 0, "seconds": seconds, "tiers": tiers}
    return Event("resumed", rank, 0.0, told)


def outcome(step: int | None = 23, **tiers: int) -> Outcome:
    """Return an outcome of :data:`LOST`."""
    return Outcome(LOST, step, tiers, 0.25, 12.0)


def test_reports_of_ranks_are_combined() -> None:
    """Bytes of all ranks are added up, by tier; the slowest rank sets the time."""
    events = [
        resumed(0, 0.25, own=1 << 20, peer=10, parity=0),
        resumed(1, 0.75, own=1 << 20, peer=0, parity=1 << 20),
    ]
    tiers = {"own": 2 << 20, "peer": 10, "parity": 1 << 20, "storage": 0}
    assert outcome_of(LOST, events, 12.0) == Outcome(LOST, 23, tiers, 0.75, 12.0)


def test_outcome_is_a_row_and_a_document() -> None:
    """Lost steps, times, and bytes by tier; the table has a dash for none, the document a 0."""
    found = outcome(20, own=2 << 20, peer=10)
    cells = ("one host lost", "23", "20", "3", "0.25 s", "12.0 s", "2.00 MiB", "10 B", "-", "-")
    assert found.row() == cells
    assert len(TITLES) == len(cells)
    assert found.document() == {
        "what": "one host lost",
        "hosts": ["b"],
        "step": 23,
        "resumed_step": 20,
        "lost_steps": 3,
        "resume_s": 0.25,
        "first_step_s": 12.0,
        "nbytes": {"own": 2 << 20, "peer": 10, "parity": 0, "storage": 0},
        "as_expected": False,
    }
    assert outcome(None).row()[2:4] == ("0", "23")


@pytest.mark.parametrize(
    "found",
    [outcome(20, parity=1), outcome(23, own=1), outcome(None)],
    ids=["step", "tier", "none"],
)
def test_unexpected_step_or_tier_is_noticed(found: Outcome) -> None:
    """A job that resumes from an earlier step, or from another tier, is not as expected."""
    assert outcome(23, parity=1).as_expected
    assert not found.as_expected


def test_losses_are_compared_exactly() -> None:
    """A step that was never taken, one that differs by the last bit, once, and one too many."""
    uninterrupted = {1: 0.5, 2: 0.25, 3: 0.125}
    assert differences([(1, 0.5), (2, 0.25), (2, 0.25), (3, 0.125)], uninterrupted) == []
    taken = [(1, 0.5), (1, 0.5 + 2**-53), (3, 0.125), (4, 0.1)]
    assert differences(taken, uninterrupted) == [1, 2, 4]


def test_the_accidents_are_worth_showing() -> None:
    """Each comes later than the step that the job before went on from, and none at a step that is
    in storage; only the last one costs steps."""
    reached = 0
    for accident in ACCIDENTS:
        assert reached < accident.step < STEPS
        assert accident.step % EVERY
        reached = accident.expected
    assert [a.step - a.expected for a in ACCIDENTS] == [0, 0, 0, ACCIDENTS[-1].step % EVERY]


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


def test_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    """Before anything starts."""
    with pytest.raises(holdfast.UsageError, match="TMPDIR"):
        Hosts(tmp_path / ("x" * 100))


def test_storage_that_processes_do_not_share_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything starts."""
    assert run_command(["keeper", "demo", "memory://x"]) == 2
    assert "share no memory:// storage" in capsys.readouterr().err
