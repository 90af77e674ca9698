"""``holdfast demo --weights``: a trainer publishes weights, and two engines follow.

One engine is killed in the middle of an update, and the trainer while it publishes. Each version
that any engine has used must equal the trainer's, bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.units import size_text
from ...drivers.uri import join, redact
from ...errors import DeadlineError
from ...storage.weights.versions import Channel
from ..progress import last_line
from ..tables import NONE, columns
from .account import Account
from .jobs import LOOK_EVERY_S, Job, StartedJob, stopped_by_sigterm
from .journal import Event

VERSIONS = 12
KILL_ENGINE_AT = 4
KILL_TRAINER_AT = 8
DEADLINE_S = 300.0
TRAINER = "trainer"
ENGINES = ("two ranks", "one rank")
TITLES = (
    *("version", "step", "stored", "of all", "push", "blocked"),
    *("two ranks: read", "update", "pause"),
    *("one rank: read", "update", "pause"),
)


@dataclass
class Outcome:
    """Events of all processes. ``pushed`` and ``updates`` by version, the latter for each engine;
    ``resumed``: starts of the trainer."""

    digests: dict[int, str] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    pushed: dict[int, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    updates: dict[str, dict[int, list[Mapping[str, Any]]]] = field(default_factory=dict)
    resumed: list[Mapping[str, Any]] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, event: Event) -> None:
        """Add an event of the process ``name``."""
        told = event.told
        if event.kind == "pushing":
            self.digests[told["version"]] = told["digest"]
            self.steps[told["version"]] = told["step"]
        elif event.kind == "published":
            self.pushed[told["version"]].append(told)
        elif event.kind == "updated":
            of_engine = self.updates.setdefault(name, defaultdict(list))
            of_engine[told["version"]].append(told)
        elif event.kind == "resumed" and event.rank == 0:
            self.resumed.append(told)
        elif event.kind == "killed":
            self.killed[name] = told["version"]

    def differing(self) -> list[str]:
        """Return the versions of engines that do not equal the trainer's."""
        return [
            f"version {version} differs on {name}"
            for name, of_engine in self.updates.items()
            for version, told in sorted(of_engine.items())
            if {update["digest"] for update in told} != {self.digests[version]}
        ]

    def is_up_to_date(self, name: str) -> bool:
        """Return whether an engine has ended on the last version."""
        return VERSIONS in self.updates.get(name, {})

    def row(self, version: int, weights_nbytes: int) -> list[str]:
        """Return the cells below :data:`TITLES`."""
        pushed = self.pushed.get(version, [])
        row = [str(version), str(self.steps[version]), *[NONE] * 4]
        if pushed:
            nbytes = sum(told["nbytes"] for told in pushed)
            row[2:] = [size_text(nbytes), f"{nbytes / weights_nbytes:.1%}"]
            row += [
                f"{max(told[name] for told in pushed) * 1000:.0f} ms"
                for name in ("seconds", "blocked_s")
            ]
        for name in ENGINES:
            told = self.updates.get(name, {}).get(version)
            if not told:
                row += [NONE] * 3
                continue
            row.append(size_text(sum(update["received_nbytes"] for update in told)))
            row += [
                f"{max(u[name_of] for u in told) * 1000:.1f} ms"
                for name_of in ("prepare_s", "pause_s")
            ]
        return row


class _Demo:
    """The processes of the demo: a trainer and two engines. One that was killed is started again,
    once."""

    def __init__(self, root: str, folder: Path) -> None:
        self.outcome = Outcome()
        self._uri = str(join(root, "run"))
        self.channel = str(join(root, "channel"))
        self._folder = folder / "logs"
        self._started: dict[str, StartedJob] = {}
        self._again: set[str] = set()

    def run(self, stack: ExitStack) -> None:
        """Run all processes to their ends. Raises RankFailedError and DeadlineError."""
        for name in (TRAINER, *ENGINES):
            self._start(name, stack, kill=name != ENGINES[0])
        until_s = time.monotonic() + DEADLINE_S
        with last_line(lines=False) as show:
            while self._started:
                self._look(stack)
                newest = max(self.outcome.pushed, default=0)
                show(f"version {newest}/{VERSIONS}")
                if time.monotonic() > until_s:
                    raise DeadlineError(f"the demo did not end within {DEADLINE_S:g} s")
                time.sleep(LOOK_EVERY_S)

    def _look(self, stack: ExitStack) -> None:
        for name, started in list(self._started.items()):
            if started.status() is None:
                continue
            del self._started[name]
            was_killed = name in self.outcome.killed and name not in self._again
            started.check(survives=not was_killed)
            if was_killed:
                self._again.add(name)
                self._start(name, stack, kill=False)

    def _start(self, name: str, stack: ExitStack, *, kill: bool) -> None:
        number = (TRAINER, *ENGINES).index(name)
        folder = self._folder / f"{number}-{'again' if name in self._again else 'first'}"
        arguments = ["--channel", self.channel, "--versions", str(VERSIONS)]
        if kill:
            at = KILL_TRAINER_AT if name == TRAINER else KILL_ENGINE_AT
            arguments += ["--kill-at", str(at)]
        script = "holdfast.cli.demo.follow_weights"
        program = None
        ranks = 2
        if name == TRAINER:
            script = "holdfast.cli.demo.train_weights"
            arguments += ["--uri", self._uri]
        elif name == ENGINES[1]:
            ranks = 1
            program = [sys.executable, "-m", script, *arguments, "--journal"]
        job = Job(folder, ranks, arguments, script=script, program=program)
        started = job.started(lambda event: self.outcome.add(name, event))
        self._started[name] = stack.enter_context(started)


def show_weights(root: str, folder: Path) -> int:
    """Run the demo. Return 0 if each version that an engine has used equals the trainer's bit for
    bit, and both have ended on the last version, else 1. Raises a HoldfastError."""
    account = Account()
    account.title("A trainer publishes its weights, and engines follow with the changes only.")
    account.chapter("Train on 2 ranks at a learning rate of 1e-6, and publish each step in bf16")
    account.say("engines follow on two ranks, by columns, and on one rank, whole; versions go to")
    account.say(redact(root))
    demo = _Demo(root, folder)
    with stopped_by_sigterm(), ExitStack() as stack:
        demo.run(stack)
    outcome = demo.outcome
    weights_nbytes = _nbytes(demo.channel)
    for line in columns(
        TITLES, [outcome.row(v, weights_nbytes) for v in sorted(outcome.steps)], left=()
    ):
        print(f"   {line}", flush=True)

    account.chapter("Kill an engine, and the trainer")
    for name, version in outcome.killed.items():
        if name == TRAINER:
            account.say(f"the trainer was killed while it published version {version}")
        else:
            account.say(f"the engine on {name} was killed in its update to version {version}")
    step, newest = (outcome.resumed[-1][name] for name in ("step", "newest"))
    account.say(f"the trainer resumed from step {step}; versions continue above {newest}")

    account.chapter("Compare")
    problems = outcome.differing()
    problems += [
        f"the engine on {name} is late" for name in ENGINES if not outcome.is_up_to_date(name)
    ]
    if len(outcome.killed) < 2:
        problems.append("a process was not killed")
    if problems:
        account.say(f"no: {', '.join(problems)}", "red")
        return 1
    count = sum(len(updates) for updates in outcome.updates.values())
    account.say(f"yes: after each of {count} updates, the engine had exactly the", "green")
    account.say("weights that the trainer published as that version, bit for bit", "green")
    return 0


def _nbytes(channel: str) -> int:
    """Return the size of the weights in the newest version."""
    with Channel(channel) as reader:
        return reader.find().manifest.tensor_nbytes
