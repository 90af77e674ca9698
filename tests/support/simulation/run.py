"""Runs and checks a schedule, or counts the results of many."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .actors import Crew
from .checker import Checker, Violation
from .endings import Ending, aftermath
from .loop import Crashed, Deadlock
from .savers import with_savers
from .schedule import Schedule, drawn
from .world import World

MOMENTS = 0.5
"""Fraction of mutating operations before which all processes die, in a copy of the world."""
WITH_SAVERS = 4
"""Every seed divisible by this is also explored with savers."""
PATIENCE_S = 400.0
"""Seconds from the last disturbance until all actors must have ended.

They cover the longest silence that an actor waits for, some retries and the cleanup.
"""


@dataclass(frozen=True)
class Failure:
    """A schedule that broke a promise. ``schedule`` includes the delays that it drew."""

    schedule: Any
    why: str


@dataclass
class Tally:
    """Counters of simulated runs."""

    runs: int = 0
    schedules: int = 0
    """Number of runs, and of schedules that begin like a run and end earlier."""
    operations: int = 0
    looks: int = 0
    copies: int = 0
    """Number of ranges that saves have borrowed."""
    finished: int = 0
    """Number of saves that savers have finished without their trainers."""
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def add(self, other: Tally) -> None:
        """Add the counters of another tally."""
        self.runs += other.runs
        self.schedules += other.schedules
        self.operations += other.operations
        self.looks += other.looks
        self.copies += other.copies
        self.finished += other.finished
        self.cpu_s += other.cpu_s
        self.faults.update(other.faults)
        self.outcomes.update(other.outcomes)

    def lines(self) -> list[str]:
        """Return the counters as readable lines."""
        counted = [
            ", ".join(f"{n:,} {name}" for name, n in c.most_common())
            for c in (self.faults, self.outcomes)
        ]
        looked = (
            f"; what was visible was checked {self.looks:,} times; "
            f"{self.copies:,} ranges were borrowed; savers have ended {self.finished:,} saves"
        )
        return [
            f"{self.schedules:,} schedules: {self.runs:,} runs, and "
            f"{self.schedules - self.runs:,} that begin like one of them and "
            f"end where everybody dies; {self.operations:,} operations of storage"
            f"{looked if self.looks else ''}",
            f"faults: {counted[0]}",
            f"outcomes: {counted[1]}",
        ]


def run(
    schedule: Schedule, tally: Tally | None = None, log: Callable[[str], None] | None = None
) -> Failure | None:
    """Run a schedule and check each of its endings. Return None if no promise is broken."""
    world = World(schedule, log)
    try:
        _run(world, tally)
        return None
    except Exception as error:
        delays = world.delays if schedule.delays is None else schedule.delays
        if log is not None:
            log(f"{world.loop.now_s:12.4f} BROKEN: {error!r}")
        return Failure(replace(schedule, delays=delays), f"{type(error).__name__}: {error}")
    finally:
        bury(world)


def _run(world: World, tally: Tally | None) -> None:
    world.be_host()
    checker, endings = Checker(world), list[Ending]()
    checker.prepare()
    moments = random.Random(world.schedule.seed * 2)

    def moment() -> None:
        if moments.random() < MOMENTS:
            endings.append(Ending.now(world, checker))

    world.on_moment = moment
    crew = Crew(world, checker)

    def over() -> bool:
        if world.loop.now_s > world.calm_s + PATIENCE_S and crew.running and not _waiting(world):
            raise Violation(f"somebody still waits {PATIENCE_S:g} s after the last disturbance")
        if crew.running == 0 and any(saver.alive for saver in world.savers):
            return False
        return crew.running == 0 or crew.problem is not None or bool(world.loop.problems)

    world.loop.run_until(over)
    if crew.problem is not None:
        raise crew.problem
    if world.loop.problems:
        raise Violation(world.loop.problems[0])
    world.on_moment = None
    aftermath(world, checker)
    for ending in endings:
        _check_ending(ending)
    if tally is not None:
        tally.runs += 1
        tally.schedules += 1 + len(endings)
        tally.operations += sum(ending.world.operations for ending in endings)
        tally.looks += sum(ending.checker.looked for ending in endings)
        tally.operations += world.operations
        tally.looks += checker.looked
        tally.copies += world.copies
        tally.finished += world.finished
        tally.faults.update(world.struck)
        tally.faults.update({f"copy {kind}": n for kind, n in world.refused_copies.items()})
        tally.faults.update(
            f"slip: {plan.slip.kind}" for plan in world.schedule.actors if plan.slip
        )
        for plan, ended in crew.outcomes:
            tally.outcomes.update(f"{plan.kind}: {_short(outcome)}" for outcome in ended)


def _check_ending(ending: Ending) -> None:
    if ending.world.log is not None:
        ending.world.log(f"-- where all have died before operation {ending.operation}:")
    try:
        ending.check()
    except Exception as error:
        raise Violation(
            f"{error!r}, where all have died before operation {ending.operation}"
        ) from error
    finally:
        bury(ending.world)


def _waiting(world: World) -> bool:
    """Return whether an actor has yet to start."""
    return any(a.begin_s > world.loop.now_s - PATIENCE_S for a in world.schedule.actors)


def _short(outcome: object) -> str:
    if outcome is None:
        return "died"
    return type(outcome).__name__ if isinstance(outcome, BaseException) else "done"


def bury(world: World) -> None:
    """Let all remaining tasks end. Their processes are dead, so no operation has an effect."""
    for process in world.processes:  # their tasks run, and every operation reports the death
        process.alive, process.paused_until_s = True, 0.0

    def dead(name: str, path: str) -> None:
        raise Crashed

    world.fs.syscall, world._next_fault = dead, dead  # type: ignore[assignment, method-assign]
    world.on_change = lambda path: None
    world.loop.raise_the_dead()
    for _ in range(1000):
        left = world.loop.pending
        if not left:
            return
        for task in left:
            task.cancel()
        try:
            world.loop.run_until(lambda left=left: all(task.done() for task in left))
        except Deadlock:
            return


def explore(seeds: range, tally: Tally) -> Failure | None:
    """Run the schedules of these seeds until one fails."""
    for seed in seeds:
        failure = run(drawn(seed), tally)
        if failure is None and seed % WITH_SAVERS == 0:
            failure = run(with_savers(drawn(seed)), tally)
        if failure is not None:
            return failure
    return None
