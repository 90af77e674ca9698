"""A keeper that is a service of systemd: a real one starts it anew, and has kept its memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.kept_job import Accident, Job
from support.kept_runs import KeptRun, expected_losses, wait_until
from support.user_systemd import user_systemd

from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE

pytestmark = pytest.mark.timeout(300)

SERVICE = """
[Service]
Type=notify
ExecStart={command} keeper run {uri} --linger 120s
Environment={variable}={base}
Restart=on-failure
FileDescriptorStoreMax=64
StandardOutput=append:{log}
StandardError=append:{log}
"""


@pytest.fixture(autouse=True)
def service(run: KeptRun) -> Iterator[None]:
    """Make the run's keeper a service."""
    text = SERVICE.format(
        command=Path(sys.executable).with_name("holdfast"),
        uri=run.uri,
        variable=KEEPER_DIR_VARIABLE,
        base=run.base,
        log=run.folder / "service.log",
    )
    with user_systemd() as systemd:
        systemd.add("keeper", text)
        wait_until(lambda: run.status_of()["pid"] > 0, 60)
        yield


def steps_held(run: KeptRun) -> list[int]:
    """Those in memory."""
    return [one["step"] for one in run.status_of()["generations"]]


def is_anew(run: KeptRun, pid: int) -> bool:
    """Whether the service has another process than this one, and that is ready."""
    status = run.status_of()
    return status["pid"] != pid and bool(status["ready"])


@pytest.mark.nightly(29)
def test_steps_survive_the_keeper_and_all_trainers(run: KeptRun) -> None:
    """Nobody is left who could hand them over: systemd has kept the memory. The job goes on from
    there, and what it keeps then is kept as well."""
    for first, accident in ((1, 6), (7, 10)):
        found = run.train(Job(15, starts=False, accident=Accident(accident, "kill")), 2)
        assert min(found.losses) == first, found.stderr
        before = run.status_of()
        assert accident in steps_held(run)
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(partial(is_anew, run, before["pid"]), 60)
        assert accident in steps_held(run)
    after = run.train(Job(15, starts=False), 2)
    assert after.code == 0, after.stderr
    assert after.resumed == {"step": 10, "tier": "memory"}
    expected = expected_losses(15)
    assert after.losses == {step: expected[step] for step in range(11, 16)}
