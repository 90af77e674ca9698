"""Training jobs under torchrun: starts them, follows their journals and ends them by process id."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...bench.measured.launch import running, torchrun
from ...errors import DeadlineError, RankFailedError
from ..text import one_of
from .journal import Event, Watcher

LOOK_EVERY_S = 0.05
_TAIL_LINES = 30
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "OMP_NUM_THREADS": "1",  # ranks do not compete for cores
    "PYTHONSAFEPATH": "1",  # no imports from the current folder
}


@dataclass(frozen=True)
class Job:
    """One run of the training script on ``ranks`` ranks of this machine. The run creates ``folder``
    for its journals and log."""

    folder: Path
    ranks: int
    arguments: Sequence[str]
    deadline_s: float = 300.0
    script: str = "holdfast.cli.demo.train"
    """Module that runs on each rank."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment of this process."""
    program: Sequence[str] | None = None
    """Command to run instead of torchrun and the training script, with the folder as its last
    argument."""

    @property
    def log(self) -> Path:
        """Path of the output of torchrun and the ranks."""
        return self.folder / "torchrun.log"

    def run(self, on_event: Callable[[Event], None], *, survives: bool = True) -> None:
        """Run the job to its end, and call ``on_event`` with each event as it happens.

        Raises RankFailedError unless the job succeeds (with ``survives`` False: fails), and
        DeadlineError. On SIGTERM, raises SystemExit after torchrun and its ranks have ended. Call
        it from the main thread.
        """
        with stopped_by_sigterm(), self.started(on_event) as started:
            until_s = time.monotonic() + self.deadline_s
            while started.status() is None:
                if time.monotonic() > until_s:
                    raise DeadlineError(
                        f"the job did not end within {self.deadline_s:g} s", advice=self.tail()
                    )
                time.sleep(LOOK_EVERY_S)
            started.check(survives=survives)

    @contextlib.contextmanager
    def started(self, on_event: Callable[[Event], None]) -> Iterator[StartedJob]:
        """Start the job, and stop it at the end of the block, unless it has ended."""
        self.folder.mkdir(parents=True)
        environment = {**_ENVIRONMENT, **self.environment}
        with (
            self.log.open("wb") as log,
            running(self._command(), environment, log, log) as process,
        ):
            yield StartedJob(self, process, on_event)

    def _command(self) -> list[str]:
        if self.program is not None:
            return [*self.program, str(self.folder)]
        return [*torchrun(self.ranks, self.script), "--journal", str(self.folder), *self.arguments]

    def tail(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"The end of {self.log}:\n" + "\n".join(lines)


class StartedJob:
    """A job that runs. Each look at its status passes on the events since the last one."""

    def __init__(
        self, job: Job, process: subprocess.Popen[bytes], on_event: Callable[[Event], None]
    ) -> None:
        self._job = job
        self._process = process
        self._watcher = Watcher(job.folder)
        self._on_event = on_event

    def status(self) -> int | None:
        """Return the exit status; None while the job runs."""
        status = self._process.poll()
        for event in self._watcher.news():
            self._on_event(event)
        return status

    def check(self, *, survives: bool = True) -> None:
        """Raise RankFailedError unless the job, which has ended, has succeeded (with ``survives``
        False: has failed)."""
        status = self.status()
        if (status == 0) != survives:
            raise RankFailedError(
                f"the job on {one_of(self._job.ranks, 'rank')} ended with status {status}",
                advice=self._job.tail(),
            )


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Raise SystemExit from the block on SIGTERM. The default action would end this process at once
    and orphan its child."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
