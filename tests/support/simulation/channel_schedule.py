"""Schedules of weight channels, as data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from .schedule import LOCAL, PAUSES_S, REMOTE, TARGETS, Fault

STORAGES = ("posix", "posix", "shared posix", "objects", "objects", "objects, late listing", "hdfs")
"""Storages with atomic exclusive puts."""
_TARGETS = (*TARGETS, "other", "other", "manifest")
"""Operations that a fault can strike. ``other``: on the head, and on leases."""
READING = 3, 2
"""Reads are disturbed in every third schedule, from the third on, so that engines are slow."""
FLIPPING = 7, 3
"""Bits flip on their way to engines in every seventh schedule, from the fourth on."""
FLIPS_MOST = 2
"""Most flips in a run: an update is tried three times."""
GAPS_S = (0.0, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True, slots=True)
class ChannelActor:
    """A trainer that publishes (``publish``), or an engine that follows (``follow``), of ``world``
    ranks. It makes ``steps`` pushes or updates, ``gap_s`` apart."""

    kind: str
    name: str
    world: int
    begin_s: float
    steps: int
    gap_s: float
    again: bool = True
    """True if it is restarted after it has died."""
    waits: bool = True
    """True if a trainer waits for each push, or an engine pauses between prepare and commit."""
    failing: int = -1
    """The push in which one rank of a trainer fails before it begins; -1: none."""
    share: float = 0.01
    """Share of the weights that a step of the trainer changes."""
    into: str = "module"
    """The target that the engine fills: a module, tensors, or nothing."""
    in_place: bool = False
    timeout_s: float = 0.0
    """Seconds that an update waits for a newer version."""
    slip: None = None


@dataclass(frozen=True, slots=True)
class ChannelSchedule:
    """A run, except delays: ``seed`` decides them during the run."""

    seed: int
    storage: str
    chunks: int
    keep: int
    anchor: int
    actors: tuple[ChannelActor, ...]
    faults: tuple[Fault, ...]
    restless: float = 0.2
    delays: Mapping[int, float] | None = None
    flips: tuple[int, ...] = ()
    """Reads of images and patches by engines in which one bit flips, counted from 1."""


def drawn(seed: int) -> ChannelSchedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    storage = rng.choice(STORAGES)
    trainers = [_trainer(rng, "trainer1", 0.0)]
    if rng.random() < 0.35:
        begin_s = rng.choice((0.0, 0.3, 3.0, 30.0)) * (0.5 + rng.random())
        trainers.append(_trainer(rng, "trainer2", begin_s))
    engines = [_engine(rng, f"engine{n}") for n in range(1, rng.choice((1, 2, 2, 3)) + 1)]
    kinds = LOCAL if "posix" in storage else REMOTE
    faults = [_fault(rng, kinds) for _ in range(rng.choice((0, 0, 1, 2, 3, 6)))]
    if seed % READING[0] == READING[1]:
        faults += _read_faults(random.Random(~seed), kinds)
    flips = _flips(random.Random(~seed)) if seed % FLIPPING[0] == FLIPPING[1] else ()
    return ChannelSchedule(
        seed,
        storage,
        chunks=rng.choice((1, 2, 4)),
        keep=rng.choice((4, 4, 5, 8)),
        anchor=rng.choice((1, 3, 5, 8, 8, 16)),
        actors=(*trainers, *engines),
        faults=tuple(faults),
        restless=rng.choice((0.02, 0.2, 0.5)),
        flips=flips,
    )


def overtaken(count: int, storage: str = "posix") -> ChannelSchedule:
    """Return a schedule in which one of two trainers sleeps at the ``count``-th operation on a
    manifest, until the other has published and deleted versions."""
    trainers = (
        ChannelActor("publish", "trainer1", 1, 0.0, 14, 1.0 if storage == "posix" else 10.0),
        ChannelActor("publish", "trainer2", 1, 0.0, 4, 1.0),
    )
    faults = (Fault("pause", "manifest", count, 300.0),)
    return ChannelSchedule(1, storage, 1, 4, 3, trainers, faults, restless=0.02)


def _trainer(rng: random.Random, name: str, begin_s: float) -> ChannelActor:
    steps = rng.choice((2, 4, 8, 14))
    return ChannelActor(
        "publish",
        name,
        world=rng.choice((1, 1, 2)),
        begin_s=begin_s,
        steps=steps,
        gap_s=rng.choice(GAPS_S[:4]),
        again=rng.random() < 0.8,
        waits=rng.random() < 0.6,
        failing=rng.randrange(steps) if rng.random() < 0.25 else -1,
        share=rng.choice((0.0, 0.001, 0.02, 0.02, 0.3, 1.0)),
    )


def _engine(rng: random.Random, name: str) -> ChannelActor:
    return ChannelActor(
        "follow",
        name,
        world=rng.choice((1, 1, 2)),
        begin_s=rng.choice((0.0, 0.0, 1.0, 20.0)) * rng.random(),
        steps=rng.choice((1, 4, 8)),
        gap_s=rng.choice(GAPS_S),
        waits=rng.random() < 0.3,
        into=rng.choice(("module", "module", "tensors", "nothing")),
        in_place=rng.random() < 0.3,
        timeout_s=rng.choice((0.0, 0.0, 2.0, 20.0)),
    )


def _fault(rng: random.Random, kinds: tuple[str, ...]) -> Fault:
    kind, target = rng.choice(kinds), rng.choice(_TARGETS)
    most = {"any": 900, "image": 300, "write": 200, "change": 200, "manifest": 120, "other": 150}
    count = 1 + int(most.get(target, 20) * rng.random() ** 1.5)
    lasts = kind in ("pause", "hang", "cut", "store")
    if kind == "outage":
        return Fault(kind, target, count, rng.choice((0.05, 0.3, 1.0, 5.0)))
    return Fault(kind, target, count, rng.choice(PAUSES_S) * (0.5 + rng.random()) if lasts else 0.0)


def _read_faults(rng: random.Random, kinds: tuple[str, ...]) -> list[Fault]:
    chosen = ("pause", "pause", "hang", "full", "eio" if "eio" in kinds else "outage")
    faults = []
    for _ in range(rng.randrange(1, 5)):
        kind = rng.choice(chosen)
        value = rng.choice((3.0, 20.0, 200.0)) if kind in ("pause", "hang") else 0.0
        faults.append(
            Fault(kind, "read", rng.randrange(1, 200), 5.0 if kind == "outage" else value)
        )
    return faults


def _flips(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 150) for _ in range(FLIPS_MOST))
