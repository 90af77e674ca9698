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
from .journal import Event, Watcher

_LOOK_EVERY_S = 0.05
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
        self.folder.mkdir(parents=True)
        watcher = Watcher(self.folder)
        environment = {**_ENVIRONMENT, **self.environment}
        with (
            self.log.open("wb") as log,
            stopped_by_sigterm(),
            running(self._command(), environment, log, log) as process,
        ):
            self._follow(process, watcher, on_event)
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
        return [*torchrun(self.ranks, self.script), "--journal", str(self.folder), *self.arguments]

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
