"""A schedule of a weight channel, run and checked."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.storage.weights.channel import LIST_LAG_S

from . import blocking
from .channel_schedule import ChannelSchedule, drawn
from .channel_truth import Push, Truth, difference
from .channel_weights import first_values, trained
from .channels import (
    URI,
    ChannelCrew,
    ChannelWorld,
    new_rank,
    publish,
    subscribe,
)
from .checker import Violation
from .run import Failure, Tally, bury
from .states import SILENCE_S
from .world import World

MOMENTS = 0.02
"""Fraction of mutating operations before which all processes die, in a copy of the world."""
MOMENTS_MOST = 12
PATIENCE_S = 3000.0
"""Seconds from the last disturbance until all jobs must have ended."""
FAULT = "fault: "
LATER_S, SOON_S = 30 * 3600.0, 1.0


@dataclass(frozen=True)
class Ending:
    """A copy of the world; all processes die before the ``operation``-th operation of a run."""

    operation: int
    world: World
    truth: Truth


def run_seed(seed: int, log: Any = None) -> Counter[str]:
    """Run the schedule of a seed; return its outcomes, counted. Raises Violation."""
    return run(drawn(seed), log)


def explore(seeds: range, tally: Tally) -> Failure | None:
    """Run the schedules of these seeds until one fails."""
    for seed in seeds:
        try:
            counted = run_seed(seed)
        except Exception as error:
            return Failure(drawn(seed), f"{type(error).__name__}: {error}")
        tally.runs += 1
        tally.schedules += 1 + counted.pop("endings", 0)
        tally.operations += counted.pop("operations")
        faults = {name for name in counted if name.startswith(FAULT)}
        tally.faults.update({name.removeprefix(FAULT): counted.pop(name) for name in faults})
        tally.outcomes.update(counted)
    return None


def run(schedule: ChannelSchedule, log: Any = None) -> Counter[str]:
    """Run a schedule, and check its endings. Raises Violation."""
    world = ChannelWorld(schedule, log)
    try:
        return _run(world)
    finally:
        bury(world)


def _run(world: ChannelWorld) -> Counter[str]:
    world.be_host()
    truth = Truth(world)
    endings: list[Ending] = []
    moments = random.Random(world.schedule.seed * 2)

    def moment() -> None:
        if moments.random() < MOMENTS and len(endings) < MOMENTS_MOST:
            left = world.left_behind()
            endings.append(Ending(world.operations, left, truth.of(left)))

    world.on_moment = moment
    crew = ChannelCrew(world, truth)

    def is_over() -> bool:
        if crew.problem is not None or world.loop.problems:
            return True
        if not crew.publishing and not crew.quiet:
            world.settle()
            for job in crew.jobs:
                job.store.away_until_s = 0.0
            world.calm_s = max(world.calm_s, world.loop.now_s)
            crew.quiet = True
        begun_s = max(job.plan.begin_s for job in crew.jobs)
        if world.loop.now_s > max(world.calm_s, begun_s) + PATIENCE_S:
            waiting = [str(r) for job in crew.jobs if not job.is_over for r in job.ranks if r.alive]
            raise Violation(f"{waiting} still wait {PATIENCE_S:g} s after the last disturbance")
        return not crew.running

    world.loop.run_until(is_over)
    if crew.problem is not None:
        raise crew.problem
    if world.loop.problems:
        raise Violation(world.loop.problems[0])
    world.on_moment = None
    _afterwards(world, truth, soon=False, space=True)
    for ending in endings:
        _check(ending)
    counted = Counter({f"{FAULT}{kind}": n for kind, n in world.struck.items()})
    for job in crew.jobs:
        counted += job.outcomes
    counted["versions"] = len(truth.published)
    counted["deleted versions"] = len(truth.deleted)
    counted["endings"] = len(endings)
    counted["operations"] = world.operations + sum(e.world.operations for e in endings)
    return counted


def _check(ending: Ending) -> None:
    world = ending.world
    if world.log is not None:
        world.log(f"-- where all have died before operation {ending.operation}:")
    world.be_host()
    try:
        if world.is_posix and world.below(2):
            world.power_cut("host")
        soon = world.below(2) == 1
        _afterwards(world, ending.truth, soon=soon, space=not soon and world.below(3) == 0)
    except Violation as error:
        raise Violation(f"{error}, where all died before operation {ending.operation}") from error
    finally:
        bury(world)


def _afterwards(world: World, truth: Truth, *, soon: bool, space: bool) -> None:
    """Check that a new reader gets the newest version, that a new trainer can publish, and that old
    versions are deleted."""
    world.loop.now_s += SOON_S if soon else LATER_S
    rank = new_rank(world, truth, "afterwards", "afterwards")
    call = _later(world, truth, rank, space=space)
    task = world.loop.spawn(rank, blocking.blocking(call))
    world.loop.run_until(task.done)
    if world.loop.problems:
        raise Violation(world.loop.problems[0])
    task.result()


def _later(world: World, truth: Truth, rank: Any, *, space: bool) -> Any:
    schedule: Any = world.schedule

    def updated(subscriber: Any) -> None:
        update = subscriber.update()
        newest = truth.published[truth.newest]
        if update is None or update.sequence != newest.sequence:
            raise Violation(f"a new subscriber gets {update}, not version {newest.sequence}")
        if different := difference(
            {n: t.clone() for n, t in subscriber.weights()}, newest.push.values
        ):
            raise Violation(f"a new subscriber gets other weights than published: {different}")

    def call() -> None:
        rng = np.random.default_rng(schedule.seed)
        if truth.newest:
            with subscribe(URI, deadline_s=SILENCE_S) as fresh:
                updated(fresh)
        values = first_values(schedule.chunks)
        with (
            publish(URI, keep=schedule.keep, anchor=schedule.anchor, lazy=False) as trainer,
            subscribe(URI, deadline_s=SILENCE_S) as follower,
        ):
            for number in range(schedule.keep + schedule.anchor + 3 if space else 2):
                values = trained(values, 0.01, rng)
                version = 1 + (-1 if trainer.newest is None else trainer.newest)
                rank.pushing = push = Push("afterwards", version, values)
                handle = trainer.push(version, {"model": values})
                handle.wait()
                truth.told(push)
                if number % 3 == 1:
                    updated(follower)
                blocking.sleep(LIST_LAG_S + 10.0)
        if space:
            truth.check_space(schedule.keep, schedule.anchor)

    return call
