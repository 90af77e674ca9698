"""Runs with keepers: jobs in separate processes, one after the other, in the same folder."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import CoordinationError
from holdfast.storage.arenas.client import status_of, stop
from holdfast.storage.arenas.folder import (
    KEEPER_DIR_VARIABLE,
    RUN_PATTERN,
    KeeperFolder,
    keeper_folders,
)

from . import kept_job
from .kept_job import Job

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Found:
    """The results of a job. ``resumed``: step and tier; ``losses``: by step, as rank 0 has written
    them; ``counters``: those of rank 0, empty if it was killed; ``seconds``: from start to end."""

    code: int
    resumed: dict[str, Any]
    losses: dict[int, float]
    counters: dict[str, Any]
    stderr: str
    seconds: float

    def check(self, step: int, tier: str, steps: int) -> None:
        """Check that the job resumed from ``step`` and reached the losses of an undisturbed run."""
        assert self.code == 0, self.stderr
        assert (self.resumed["step"], self.resumed["tier"]) == (step, tier), self.stderr
        self.check_losses(steps)

    def check_losses(self, steps: int) -> None:
        """Check that the losses after the resumed step equal the losses of an undisturbed run."""
        expected = expected_losses(steps)
        begun = self.resumed["step"] or 0
        assert self.losses == {step: expected[step] for step in range(begun + 1, steps + 1)}


@dataclass
class KeptRun:
    """A run's folder, and the keepers of the jobs in it."""

    folder: Path
    base: Path
    jobs: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def uri(self) -> Path:
        """The location of the run's checkpoints."""
        return self.folder / "run"

    def train(self, job: Job, world: int = 1) -> Found:
        """Run a job to its end, on ``world`` ranks."""
        process, out = self.begin(job, world)
        began_s = time.monotonic()
        try:
            _, stderr = process.communicate(timeout=110)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the job hangs: {_ended(process)}") from error
        return Found(
            process.returncode,
            _read_json(out / "resumed 0"),
            _losses(out / "losses 0"),
            _read_json(out / "counters 0"),
            stderr,
            time.monotonic() - began_s,
        )

    def begin(
        self, job: Job, world: int = 1, *, isolated: bool = False
    ) -> tuple[subprocess.Popen[str], Path]:
        """Start a job; return its process, and the folder of its results. ``isolated``: in its own
        network namespace."""
        self.jobs += 1
        out = self.folder / f"job {self.jobs}"
        out.mkdir()
        command = [sys.executable]
        if world > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command += [str(kept_job.__file__), str(self.uri), str(out), job.encode()]
        if isolated:
            command = [
                "unshare",
                "--net",
                "sh",
                "-c",
                'ip link set lo up; exec "$@"',
                "sh",
                *command,
            ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(TESTS),
            KEEPER_DIR_VARIABLE: str(self.base),
            **self.environment,
        }
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        return process, out

    def keeper_of(self, host: str = "") -> KeeperFolder:
        """Return the folder of a host's keeper. ``host`` is "" for a job without hosts."""
        run = json.loads((self.uri / "run.json").read_text())["run"]
        return KeeperFolder.of(run, self.base / host)

    def status_of(self, host: str = "") -> dict[str, Any]:
        """Return the status of a host's keeper."""
        status = status_of(self.keeper_of(host))
        assert status is not None
        return status

    @contextmanager
    def stopped_keeper(self, host: str = "") -> Iterator[int]:
        """Stop a host's keeper during the body, as on an overloaded host; yield its process id.

        The body may resume it earlier.
        """
        pid = int(self.keeper_of(host).lock.read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):  # the keeper ends with the training
                os.kill(pid, signal.SIGCONT)

    def lose(self, *hosts: str) -> None:
        """Lose hosts, with all that is in their memory."""
        for host in hosts:
            os.kill(int(self.keeper_of(host).lock.read_text()), signal.SIGKILL)
            shutil.rmtree(self.base / host)

    def train_beside_stopped_keeper(
        self, job: Job, world: int = 1, host: str = "", *, until: str, pause_s: float = 0
    ) -> Found:
        """Train while a host's keeper is stopped. It resumes once rank 0 is ``until``, "resuming" or
        "resumed", and has not resumed within ``pause_s`` after that."""
        out = self.folder / f"job {self.jobs + 1}"
        with self.stopped_keeper(host) as pid, ThreadPoolExecutor(1) as pool:
            training = pool.submit(self.train, job, world)
            wait_until((out / f"{until} 0").exists, 60)
            time.sleep(pause_s)
            assert (out / "resumed 0").exists() == (until == "resumed")
            os.kill(pid, signal.SIGCONT)
            return training.result()

    def steps(self) -> list[int | None]:
        """Return the steps in storage."""
        return [c.step for c in holdfast.list_checkpoints(self.uri)]

    def verify(self) -> None:
        """Verify all checkpoints in storage."""
        for step in self.steps():
            with holdfast.open(self.uri / f"step-{step:08d}") as checkpoint:
                checkpoint.verify()

    def end_keepers(self) -> None:
        """End all keepers, in whatever state."""
        _end_keepers(self.base)


def trainers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of a job's trainers, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children] or [process.pid]


def _ended(process: subprocess.Popen[str]) -> str:
    """End a job that hangs; return its output, and the stack of each of its trainers."""
    trainers = trainers_of(process)
    for pid in trainers:
        os.kill(pid, signal.SIGUSR1)  # see kept_job
    time.sleep(2)
    for pid in {*trainers, process.pid}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    return stderr


def _end_keepers(base: Path) -> None:
    hosts = [path for path in base.iterdir() if not RUN_PATTERN.fullmatch(path.name)]
    for folder in itertools.chain(*map(keeper_folders, [base, *hosts])):
        try:
            status = status_of(folder)
            if status is not None:
                stop(folder)
        except CoordinationError:
            os.kill(int(folder.lock.read_text()), signal.SIGKILL)


@contextmanager
def keepers_below_a_folder() -> Iterator[None]:
    """Make this process start keepers below a separate folder during the body, and end them. The
    path of a socket must be short, so it is no test's folder."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        os.environ[KEEPER_DIR_VARIABLE] = base
        try:
            yield
        finally:
            del os.environ[KEEPER_DIR_VARIABLE]
            _end_keepers(Path(base))


def keep(run: holdfast.Checkpointer, step: int, state: Mapping[str, object]) -> holdfast.SaveHandle:
    """Take a step, and wait until it is kept in memory, and in storage if it is due there."""
    handle = run.step(step, state)
    assert handle is not None
    handle.wait(60)
    return handle


@pytest.fixture
def run(tmp_path: Path) -> Iterator[KeptRun]:
    """Return a run with its own keepers, which end with it. The path of a socket must be short, so
    they have a folder elsewhere."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        made = KeptRun(tmp_path, Path(base))
        try:
            yield made
        finally:
            made.end_keepers()


def wait_until(done: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until ``done()``; fail after ``seconds``."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        with suppress(AssertionError, FileNotFoundError):
            if done():
                return
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def expected_losses(steps: int) -> dict[int, float]:
    """Return the losses of an undisturbed run."""
    state = kept_job.new_state(Job(steps, numel=16), 0)
    return {step: kept_job.take_step(state, step) for step in range(1, steps + 1)}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _losses(path: Path) -> dict[int, float]:
    if not path.exists():
        return {}
    lines = [line.split() for line in path.read_text().splitlines()]
    return {int(step): float(loss) for step, loss in lines}
