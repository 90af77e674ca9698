"""``holdfast keeper``: run the keeper of a run, show the state of keepers, and end them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from support.commands import HOLDFAST, finished, run, run_json

import holdfast
from holdfast.cli.demo.hosts import Hosts
from holdfast.cli.demo.keepers import Accident, Outcome
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for the keepers of one test."""
    with tempfile.TemporaryDirectory(prefix="hk") as folder:
        monkeypatch.setenv(KEEPER_DIR_VARIABLE, folder)
        yield Path(folder)
        run("keeper", "stop", status=ANY)


def keepers() -> list[dict[str, Any]]:
    """Return the output of ``holdfast keeper status --json``."""
    found: list[dict[str, Any]] = run_json("keeper", "status")["keepers"]
    return found


def test_without_a_keeper_there_is_nothing_to_show(base: Path) -> None:
    """This is not a failure, but there is no keeper to end either."""
    assert keepers() == []
    assert "no keeper is running" in run("keeper", "status").stdout
    run("keeper", "stop", status=1)


def test_the_keeper_of_a_run_is_started_by_hand(base: Path, tmp_path: Path) -> None:
    """A second one of the same run is not; trainers find the first, and it can be ended."""
    command = [*HOLDFAST, "keeper", "run", str(tmp_path), "--memory", "64MiB", "--domain", "rack 7"]
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    command += ["--cpus", str(cpu), "--max-bytes-per-s", "1GB"]
    keeper = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 30
    while not (found := keepers()) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert (found[0]["pid"], found[0]["host"], found[0]["epoch"]) == (keeper.pid, "rack 7", -1)
    assert os.sched_getaffinity(keeper.pid) == {cpu}
    second = finished(command)
    assert second.returncode == 1
    assert "a keeper of this run is already running" in second.stderr

    state = {"w": torch.arange(1000.0)}
    keeping = holdfast.Keeper(starts=False)
    with holdfast.Checkpointer(tmp_path, keeper=keeping, grace_s=None) as training:
        handle = training.step(3, state)
        assert handle is not None
        handle.wait(30)
        assert "durable" not in repr(handle)
        with pytest.raises(holdfast.UsageError, match="stays in memory"):
            handle.durable.wait(1)
        assert handle.durable.done()  # there is nothing to wait for
    (found_now,) = keepers()
    generations = found_now["generations"]
    assert generations == [{"epoch": 0, "step": 3, "world": 1, "ranks": [0], "agreed": True}]
    assert str(keeper.pid) in run("keeper", "status", tmp_path).stdout

    watch = [*command[:3], "keeper", "status", "--watch", "--json"]
    with subprocess.Popen(watch, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        lines = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.kill()
    assert [line["keepers"][0]["pid"] for line in lines] == [keeper.pid] * 2

    printed = run("keeper", "stop", tmp_path).stdout
    assert f"process {keeper.pid} stops and frees" in printed
    assert keeper.wait(30) == 0
    assert keeper.stderr is not None
    keeper.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "x", "--memory", "lots"], "lots"),
        (["run", "x", "--cpus", "99999"], "cannot run on the CPUs 99999"),
        (["status", "nowhere"], "no Checkpointer with a keeper has used this folder"),
    ],
)
def test_a_call_that_cannot_be_carried_out_says_why(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """The status is 2."""
    monkeypatch.chdir(tmp_path)
    assert said in run("keeper", *arguments, status=2).stderr


# Parts of the demo; tests/crash/test_keeper_demo.py runs all of it.


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


def test_a_folder_or_storage_that_the_demo_cannot_use_is_refused(
    tmp_path: Path,
) -> None:
    """It says so before anything starts."""
    with pytest.raises(holdfast.UsageError, match="TMPDIR"):
        Hosts(tmp_path / ("x" * 100))
    assert "share no memory:// storage" in run("keeper", "demo", "memory://x", status=2).stderr
