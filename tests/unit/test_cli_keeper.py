"""``holdfast keeper``: be the keeper of a run, see what keepers do, and end them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.app import run as main
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the keepers of one test."""
    with tempfile.TemporaryDirectory(prefix="hk") as folder:
        monkeypatch.setenv(KEEPER_DIR_VARIABLE, folder)
        yield Path(folder)
        main(["keeper", "stop"])


def status(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """What ``holdfast keeper status --json`` prints."""
    assert main(["keeper", "status", "--json"]) == 0
    keepers = json.loads(capsys.readouterr().out)["keepers"]
    assert isinstance(keepers, list)
    return keepers


def test_without_a_keeper_there_is_nothing_to_show(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is no failure; but there is nothing to be ended either."""
    assert status(capsys) == []
    assert main(["keeper", "status"]) == 0
    assert "no keeper is running" in capsys.readouterr().out
    assert main(["keeper", "stop"]) == 1


def test_the_keeper_of_a_run_is_started_by_hand(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second one of the same run is not; trainers find the first, and it can be ended."""
    command = [sys.executable, "-c", "import sys, holdfast.cli as c; sys.exit(c.main())"]
    command += ["keeper", "run", str(tmp_path), "--memory", "64MiB", "--domain", "rack 7"]
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    command += ["--cpus", str(cpu), "--max-bytes-per-s", "1GB"]
    keeper = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 30
    while not (found := status(capsys)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert (found[0]["pid"], found[0]["host"], found[0]["epoch"]) == (keeper.pid, "rack 7", -1)
    assert os.sched_getaffinity(keeper.pid) == {cpu}
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert "a keeper of this run is already running" in second.stderr

    state = {"w": torch.arange(1000.0)}
    keeping = holdfast.Keeper(starts=False)
    with holdfast.Checkpointer(tmp_path, keeper=keeping, grace_s=None) as run:
        handle = run.step(3, state)
        assert handle is not None
        handle.wait(30)
        assert "durable" not in repr(handle)
        with pytest.raises(holdfast.UsageError, match="stays in memory"):
            handle.durable.wait(1)
        assert handle.durable.done()  # there is nothing to wait for
    (found_now,) = status(capsys)
    generations = found_now["generations"]
    assert generations == [{"epoch": 0, "step": 3, "world": 1, "ranks": [0], "agreed": True}]
    assert main(["keeper", "status", str(tmp_path)]) == 0
    assert str(keeper.pid) in capsys.readouterr().out

    watch = [*command[:3], "keeper", "status", "--watch", "--json"]
    with subprocess.Popen(watch, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        lines = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.kill()
    assert [line["keepers"][0]["pid"] for line in lines] == [keeper.pid] * 2

    assert main(["keeper", "stop", str(tmp_path)]) == 0
    assert f"process {keeper.pid} stops and frees" in capsys.readouterr().out
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
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    """With status 2."""
    monkeypatch.chdir(tmp_path)
    assert main(["keeper", *arguments]) == 2
    assert said in capsys.readouterr().err
