"""Training jobs under torchrun: starts them, follows their journals and ends them by process id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DeadlineError, RankFailedError
from .journal import Event, Watcher

_LOOK_EVERY_S = 0.05
_STOP_S = 40.0  # torchrun gives its ranks 30 s to stop
_TAIL_LINES = 30


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
        self.folder.mkdir(parents=True)
        watcher = Watcher(self.folder)
        with self.log.open("wb") as log, stopped_by_sigterm():
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment() | dict(self.environment),
            )
            try:
                self._follow(process, watcher, on_event)
            finally:
                _stop(process)
        for event in watcher.news():
            on_event(event)
        if (process.returncode == 0) != survives:
            raise RankFailedError(
                f"the job on {self.ranks} ranks ended with status {process.returncode}",
                advice=self.tail(),
            )

    def _command(self) -> list[str]:
        if self.program is not None:
            return [*self.program, str(self.folder)]
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            "--max-restarts=0",
        ]
        job = ["-m", self.script, "--journal", str(self.folder), *self.arguments]
        return [sys.executable, *launcher, f"--nproc-per-node={self.ranks}", *job]

    def _follow(
        self, process: subprocess.Popen[bytes], watcher: Watcher, on_event: Callable[[Event], None]
    ) -> None:
        deadline = time.monotonic() + self.deadline_s
        while process.poll() is None:
            for event in watcher.news():
                on_event(event)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the job did not end within {self.deadline_s:g} s", advice=self.tail()
                )
            time.sleep(_LOOK_EVERY_S)

    def tail(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"The end of {self.log}:\n" + "\n".join(lines)


def _environment() -> dict[str, str]:
    """Return the environment of jobs: loopback only, one thread per rank so that ranks do not
    compete for cores, and no imports from the current folder."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return os.environ | {
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
    }


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


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks, unless it has ended already."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
