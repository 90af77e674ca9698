"""A keeper that is a service of systemd: a real systemd restarts it, and has kept its memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.kept_job import Accident, Job
from support.kept_runs import KeptRun, wait_until

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
    with user_systemd(text):
        wait_until(lambda: run.status_of()["pid"] > 0, 60)
        yield


def steps_held(run: KeptRun) -> list[int]:
    """Return the steps in memory."""
    return [one["step"] for one in run.status_of()["generations"]]


def is_anew(run: KeptRun, pid: int) -> bool:
    """Return whether the service has a new process that is ready."""
    status = run.status_of()
    return status["pid"] != pid and bool(status["ready"])


@pytest.mark.nightly(29)
def test_steps_survive_the_keeper_and_all_trainers(run: KeptRun) -> None:
    """No process is left to hand them over, but systemd has kept the memory. The job resumes from
    there, and its next steps are kept as well."""
    for first, accident in ((1, 6), (7, 10)):
        found = run.train(Job(15, starts=False, accident=Accident(accident, "kill")), 2)
        assert min(found.losses) == first, found.stderr
        before = run.status_of()
        assert accident in steps_held(run)
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(partial(is_anew, run, before["pid"]), 60)
        assert accident in steps_held(run)
    after = run.train(Job(15, starts=False), 2)
    after.check(10, "memory", 15)


_SYSTEMD = "/lib/systemd/systemd"
_AS_IF_BOOTED = 'mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec "$@"'
_STARTED_S = 20.0


@contextmanager
def user_systemd(service: str) -> Iterator[None]:
    """Run a systemd with this service. Skips the test if there is none, or it does not start."""
    if not os.path.exists(_SYSTEMD) or not shutil.which("unshare") or os.getuid():
        pytest.skip("no systemd, or no right to run one in a namespace of mounts")
    in_namespace = ["unshare", "--mount", "sh", "-c", _AS_IF_BOOTED, "sh"]
    with tempfile.TemporaryDirectory(prefix="sd") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        described = Path(folder, "systemd", "user", "keeper.service")
        described.parent.mkdir(parents=True)
        described.write_text(service)
        log = Path(folder) / "log"

        def ask(*arguments: str) -> str:
            """Return the output of ``systemctl``."""
            done = subprocess.run(
                [*in_namespace, "systemctl", "--user", *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            return done.stdout.strip()

        with log.open("w") as out:
            process = subprocess.Popen(
                [*in_namespace, _SYSTEMD, "--user", "--log-target=console"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            until_s = time.monotonic() + _STARTED_S
            while ask("is-system-running") not in ("running", "degraded"):
                if process.poll() is not None or time.monotonic() > until_s:
                    pytest.skip(f"systemd does not run here: {log.read_text()[-300:]}")
                time.sleep(0.2)
            ask("start", "--no-block", "keeper")
            yield
        finally:
            if process.poll() is None:
                ask("exit")
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
