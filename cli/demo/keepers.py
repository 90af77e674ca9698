"""``holdfast keeper demo``: four hosts keep each step in memory and are lost in turn.

After each accident a new job resumes. At the end, the losses must equal an uninterrupted run's.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...core.units import size_text
from ...drivers.uri import redact
from ...errors import RankFailedError
from ..progress import last_line
from ..tables import Table
from ..text import one_of
from .account import Account
from .hosts import HOSTS, Hosts
from .jobs import Job, stopped_by_sigterm
from .journal import Event
from .plan import checkpoints_uri

EVERY = 10
"""Steps between two saves to storage."""
STEPS = 40

TITLES = (
    "what happened",
    "at step",
    "resumed from",
    "lost",
    "resume",
    "to first step",
    "own memory",
    "other hosts",
    "rebuilt",
    "storage",
)
TIERS = ("own", "peer", "parity", "storage")


@dataclass(frozen=True, slots=True)
class Accident:
    """An accident: at ``step`` all trainers are killed, and these ``hosts`` are lost.

    ``expected`` is the step from which the next job should resume. ``tier`` is where most of its
    bytes should come from, one of :data:`TIERS`.
    """

    title: str
    step: int
    hosts: tuple[str, ...]
    expected: int
    tier: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The resume after an accident.

    ``tiers`` holds bytes over all ranks, ``resume_s`` the time of the slowest rank, and
    ``first_step_s`` the time from the start of the job to its first step.
    """

    accident: Accident
    step: int | None
    tiers: Mapping[str, int]
    resume_s: float
    first_step_s: float

    @property
    def as_expected(self) -> bool:
        """Return whether the job resumed from the expected step and the expected tier."""
        return self.step == self.accident.expected and bool(self.tiers.get(self.accident.tier))

    def row(self) -> tuple[str, ...]:
        """Return the cells below :data:`TITLES`."""
        step = self.step or 0
        nbytes = [self.tiers.get(tier, 0) for tier in TIERS]
        return (
            self.accident.title,
            str(self.accident.step),
            str(step),
            str(self.accident.step - step),
            f"{self.resume_s:.2f} s",
            f"{self.first_step_s:.1f} s",
            *(size_text(n) if n else "-" for n in nbytes),
        )


ACCIDENTS = (
    Accident("all trainers killed", 14, (), 14, "own"),
    Accident("one host lost", 23, ("b",), 23, "parity"),
    Accident("two hosts lost", 27, ("a", "c"), 27, "parity"),
    Accident("all hosts lost", 35, HOSTS, 30, "storage"),
)


def main(*, uri: str | None) -> int:
    """Run the demo from the main thread. Return 0 if each job resumed as expected and all losses
    equal those of an uninterrupted run, else 1. Raises a HoldfastError."""
    with stopped_by_sigterm(), _folders() as (folder, hosts):
        demo = _Demo(checkpoints_uri(uri, folder), folder, hosts)
        demo.run()
    demo.print_account()
    return int(not demo.as_expected)


@contextmanager
def _folders() -> Iterator[tuple[Path, Hosts]]:
    """Yield a folder for jobs and checkpoints, and the hosts. Remove both at the end, also after an
    error."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-demo-"))
        base = stack.enter_context(tempfile.TemporaryDirectory(prefix="hfk-"))
        hosts = Hosts(Path(base))
        stack.callback(hosts.end)
        yield Path(folder), hosts


class _Demo:
    def __init__(self, root: str, folder: Path, hosts: Hosts) -> None:
        self.root = root
        self.folder = folder
        self.hosts = hosts
        self.account = Account()
        self.outcomes: list[Outcome] = []
        self.taken: list[tuple[int, float]] = []
        """Each step taken and its loss; some steps are taken more than once."""
        self.uninterrupted: dict[int, float] = {}
        self.seconds = 0.0

    @property
    def differing(self) -> list[int]:
        """Steps that were not taken, or whose loss differs from the uninterrupted run."""
        losses: dict[int, set[float]] = {step: set() for step in self.uninterrupted}
        for step, loss in self.taken:
            losses.setdefault(step, set()).add(loss)
        return [step for step in sorted(losses) if losses[step] != {self.uninterrupted.get(step)}]

    @property
    def as_expected(self) -> bool:
        """Return whether every resume and every loss was as expected."""
        return not self.differing and all(outcome.as_expected for outcome in self.outcomes)

    def run(self) -> None:
        """Run all jobs, with the accidents between them."""
        began_s = time.monotonic()
        self.account.title(
            f"{len(HOSTS)} hosts keep each step in memory, and are lost one after the other."
        )
        self.account.say(f"every {EVERY}th step goes to {redact(self.root)}")
        before: Accident | None = None
        for number, accident in enumerate([*ACCIDENTS, None], 1):
            job = _RunningJob(self, number, before, accident)
            job.run()
            self.taken += job.taken
            if before is not None:
                self.outcomes.append(job.outcome(before))
            before = accident
        self.seconds = time.monotonic() - began_s

    def print_account(self) -> None:
        """Print the table and the verdict."""
        print()
        rows = [outcome.row() for outcome in self.outcomes]
        Table("Resume of the next job", TITLES, rows, TITLES[:1]).print()
        if self.differing:
            self.account.say(
                f"losses differ from an uninterrupted run at steps {self.differing}", "red"
            )
        else:
            self.account.say(
                f"all {STEPS} losses are exactly those of an uninterrupted run", "green"
            )
        for outcome in self.outcomes:
            if not outcome.as_expected:
                accident = outcome.accident
                self.account.say(
                    f"{accident.title}: not step {accident.expected} from {accident.tier}", "red"
                )
        self.account.say(f"{self.seconds:.0f} s in all")


class _RunningJob:
    """A job that resumes after the accident ``before`` (None for the first job) and runs until
    ``accident`` (None for the last job)."""

    def __init__(
        self, demo: _Demo, number: int, before: Accident | None, accident: Accident | None
    ) -> None:
        self._demo = demo
        self._before = before
        self._accident = accident
        until = STEPS if accident is None else accident.step
        arguments = ["--uri", demo.root, "--every", str(EVERY), "--until", str(until)]
        if accident is None:
            arguments.append("--last")
        self._job = Job(
            demo.folder / f"job-{number}",
            len(HOSTS),
            arguments,
            deadline_s=240.0,
            script="holdfast.cli.demo.train_kept",
            # torchrun and torch leave temporary folders.
            environment={**demo.hosts.environment, "TMPDIR": str(demo.folder)},
        )
        self._pids: set[int] = set()
        self._resumed: list[Event] = []
        self._guarded: set[int] = set()
        self._failures: list[str] = []
        self._began_s = 0.0
        self._first_step_s = 0.0
        self.taken: list[tuple[int, float]] = []

    def run(self) -> None:
        """Run the job to its end. Raises RankFailedError if it ends otherwise than planned."""
        account = self._demo.account
        if self._before is None:
            account.chapter("Train on four hosts")
        else:
            account.chapter(f"Resume after: {self._before.title}")
        self._began_s = time.time()
        with last_line(lines=False) as show:
            show("torchrun starts the ranks")
            self._job.run(self._hear, survives=self._accident is None)
        if self._accident is not None and len(self._guarded) < len(HOSTS):
            failed = "; ".join(self._failures) or "the ranks do not say why"
            raise RankFailedError(
                f"the job ended before step {self._accident.step} was protected: {failed}",
                advice=self._job.tail(),
            )

    def outcome(self, before: Accident) -> Outcome:
        """Return the outcome of the accident before this job."""
        told = [event.told for event in self._resumed]
        tiers = {tier: sum(of["tiers"].get(tier, 0) for of in told) for tier in TIERS}
        resume_s = max(of["seconds"] for of in told)
        return Outcome(before, told[0]["step"], tiers, resume_s, self._first_step_s)

    def _hear(self, event: Event) -> None:
        told = event.told
        if event.kind == "ready":
            self._pids.add(told["pid"])
        elif event.kind == "resumed":
            self._resumed.append(event)
            if len(self._resumed) == len(HOSTS):
                self._say_resumed()
        elif event.kind == "step" and event.rank == 0:
            self._first_step_s = self._first_step_s or event.time_s - self._began_s
            self.taken.append((told["step"], told["loss"]))
        elif event.kind == "uninterrupted" and event.rank == 0:
            self._demo.uninterrupted[told["step"]] = told["loss"]
        elif event.kind == "failed":
            self._failures.append(f"rank {event.rank}: {told['message']}")
        elif event.kind == "protected":
            self._guarded.add(event.rank)
            if len(self._guarded) == len(HOSTS):
                self._have_accident()

    def _say_resumed(self) -> None:
        step = self._resumed[0].told["step"]
        if self._before is None:
            self._demo.account.say("four ranks train, each on a host with a keeper")
            return
        outcome = self.outcome(self._before)
        nbytes = ", ".join(f"{tier} {size_text(n)}" for tier, n in outcome.tiers.items() if n)
        self._demo.account.say(
            f"resumes from step {step}, within {outcome.resume_s:.2f} s ({nbytes})"
        )

    def _have_accident(self) -> None:
        accident = self._accident
        assert accident is not None
        account = self._demo.account
        first, last = self.taken[0], self.taken[-1]
        account.say(
            f"steps {first[0]} to {last[0]}: loss {first[1]:.4f} to {last[1]:.4f}; step {last[0]} "
            "is in memory, and protected against the loss of two hosts"
        )
        for pid in self._pids:  # before the keepers, which the trainers would restart
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._demo.hosts.lose(accident.hosts)
        lost = "their keepers live on"
        if accident.hosts:
            lost = f"{one_of(len(accident.hosts), 'host')} lost: {', '.join(accident.hosts)}"
        account.say(f"kill -9 of all trainers at step {accident.step}; {lost}", "red")
