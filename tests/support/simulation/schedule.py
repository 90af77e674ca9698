"""The schedule of a run, as data: drawn from a seed, and small enough to print, edit and replay.

A run counts its operations: requests of remote storage, system calls of a local disk. A fault
strikes at the n-th operation of a kind: any operation, one on a manifest, fate, marker or image, or
one that changes what is visible. A run draws delays when it needs them and records them. A schedule
with recorded delays draws none.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

STORAGES = (
    "posix",
    "shared posix",
    "objects",
    "objects, late listing",
    "objects, no exclusive put",
    "hdfs",
)
TARGETS = (
    "any",
    "manifest",
    "fate",
    "marker",
    "image",
    "write",
    "change",
    "change",
    "list",
    "commit",
    "commit",
    "claim",
)
"""Operations that a fault can strike. ``write``: writes bytes that are not yet visible. ``change``:
makes something visible, or removes it. ``commit`` and ``claim``: write a manifest, or a fate."""

LOCAL = ("eio", "full", "fsync", "die", "die", "pause", "power", "power", "hang", "store")
REMOTE = (
    "refused",
    "unsure",
    "outage",
    "late",
    "twice",
    "busy",
    "full",
    "die",
    "die",
    "pause",
    "power",
    "cut",
    "hang",
    "store",
)
FAULTS = tuple(dict.fromkeys((*LOCAL, *REMOTE)))

PAUSES_S = (1.0, 20.0, 200.0, 1500.0)
LENDING = 4
"""Saves borrow in one out of this many schedules."""
LENDERS = (
    "objects, copies",
    "objects, copies",
    "objects, large copies",
    "posix, copies",
    "posix, copies",
    "shared posix, copies",
    "hdfs",
)
"""Storages of schedules that borrow. Some copy any range server-side, some only large ones."""
LINKING = 8, 4
"""Saves share files in every eighth schedule, from the fifth on."""
LINKERS = ("posix, links", "posix, links", "shared posix, links", "objects, links")
"""Storages of schedules that share files: none copies server-side."""
COPY_FAULTS = ("refused", "unsure", "late", "twice", "busy", "full", "eio")
"""If such a fault strikes a copy, the save writes the bytes instead and does not fail."""
BASES = ("-", "a", "a", "a", "a", "b", "c", "c", "c", "c", "d")
"""Folders from which a save or a copy may borrow. ``-``: does not exist; ``a``: the checkpoint that
the save replaces; ``b`` and ``c``: earlier checkpoints; ``d``: was never committed."""
SLIPPING = 0.25
"""Share of the schedules with a multi-rank job in which a rank slips."""
SLIPS = ("local error", "local error", "late", "late", "load", "elsewhere", "other step", "death")


@dataclass(frozen=True, slots=True)
class Slip:
    """One rank's deviation from the others in the first call of its job."""

    kind: str
    rank: int
    late_s: float
    """Seconds by which the rank comes later than the others; negative if it comes earlier."""
    meet: bool
    """True if the ranks meet before the next call, which then has the same name. Ignored after a
    death."""
    failing: tuple[int, ...] = ()
    """Further calls of that name if the ranks meet. Each entry is a bit mask of the ranks that fail
    before the call begins."""


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One actor: a job of ``world`` ranks that saves ``state`` or loads; a copy; a prune; a manual
    removal."""

    kind: str
    name: str
    world: int
    begin_s: float
    state: int = 0
    again: bool = False
    """True if it is restarted after it has died or failed."""
    odd: bool = False
    """True if its ranks disagree on who holds which data: it must never be committed."""
    slip: Slip | None = None
    """A slip in the job's first call; a second call follows."""
    saver: bool = False
    """True if its ranks save through savers."""
    killed_s: float = 0.0
    """Seconds after their start at which its ranks are killed, one after the other; 0: never."""
    base: str = ""
    """One of ``BASES``: the folder that a save or a copy may borrow from, or that is removed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault ``kind`` that strikes at the ``count``-th operation on ``target``. ``value``: its
    duration in seconds, if it lasts."""

    kind: str
    target: str
    count: int
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that decides a run, except delays: ``seed`` decides them if ``delays`` is None."""

    seed: int
    storage: str
    chunks: int
    """Approximate number of chunks in a rank's image."""
    before: bool
    """True if a checkpoint exists when the run begins."""
    actors: tuple[ActorPlan, ...]
    faults: tuple[Fault, ...]
    restless: float = 0.2
    """Share of the operations that take longer than the minimum."""
    delays: Mapping[int, float] | None = None


def drawn(seed: int) -> Schedule:
    """Draw the schedule of a seed."""
    rng = random.Random(seed)
    storage, lending = rng.choice(STORAGES), random.Random(~seed)
    links = seed % LINKING[0] == LINKING[1]
    if borrows := links or seed % LENDING == 1:  # an own generator: the other draws stay the same
        storage = lending.choice(LINKERS if links else LENDERS)
    actors = _actors(rng)
    kinds = LOCAL if "posix" in storage else REMOTE
    most = 3 if rng.random() < 0.8 else 8
    faults = [_fault(rng, kinds, len(actors)) for _ in range(rng.randrange(most + 1))]
    if rng.random() < 0.1:
        faults = []
    chunks = rng.choice((2, 4, 8, 24))
    before, restless = rng.random() < 0.8, rng.choice((0.02, 0.2, 0.6))
    actors += _second_copy(rng, actors)
    schedule = Schedule(seed, storage, chunks, before, actors, tuple(faults), restless)
    schedule = _slipping(rng, schedule)
    return _lending(lending, schedule) if borrows else schedule


def _slipping(rng: random.Random, schedule: Schedule) -> Schedule:
    """Let a rank slip in some schedules. In half of these, nothing else fails and no other actor
    saves."""
    jobs = [a for a in schedule.actors if a.kind == "save" and a.world > 1 and not a.odd]
    if not jobs or rng.random() >= SLIPPING:
        return schedule
    job, alone = rng.choice(jobs), rng.random() < 0.5
    slips = replace(job, slip=_slip(rng, job.world))
    actors = [
        slips if a is job else a
        for a in schedule.actors
        if a is job or a.kind == "load" or not alone
    ]
    return replace(schedule, actors=tuple(actors), faults=() if alone else schedule.faults)


def _slip(rng: random.Random, world: int) -> Slip:
    kind = rng.choice(SLIPS)
    late_s = rng.choice((0.0, 0.0, 0.1, 3.0, 30.0)) * (0.5 + rng.random() / 2)
    if kind == "late":
        late_s = 55.0 + 60.0 * rng.random()
    sign = 1 if kind == "death" else rng.choice((-1, 1, 1))
    slip = Slip(kind, rng.randrange(world), sign * late_s, rng.random() < 0.5)
    # Later draws do not change the rest of a schedule.
    if kind == "death":
        return replace(slip, late_s=rng.choice((1, 1, -1)) * late_s)
    if kind == "local error" and slip.meet:
        return replace(
            slip, failing=tuple(rng.randrange(1, 2**world) for _ in range(rng.randrange(6)))
        )
    return slip


def _second_copy(rng: random.Random, actors: tuple[ActorPlan, ...]) -> tuple[ActorPlan, ...]:
    """Often give a copy a companion: both continue the same attempt."""
    first = next((a for a in actors if a.kind == "copy"), None)
    if first is None or rng.random() < 0.5:
        return ()
    begin_s = first.begin_s + rng.choice((0.0, 0.01, 0.1)) * rng.random()
    return (replace(first, name=f"copy{len(actors) + 1}", begin_s=begin_s),)


def _lending(rng: random.Random, schedule: Schedule) -> Schedule:
    """Let saves and copies borrow, often with equal world sizes. Sometimes remove a lender."""
    world = min(actor.world for actor in schedule.actors if actor.kind == "save")
    alike = rng.random() < 0.7
    actors = [
        replace(a, base=rng.choice(BASES)) if a.kind in ("save", "copy") else a
        for a in schedule.actors
    ]
    if alike:
        actors = [
            replace(a, world=world, odd=a.odd and world > 1) if a.kind == "save" else a
            for a in actors
        ]
    if rng.random() < 0.4:
        begin_s = rng.choice((0.0, 0.03, 0.1, 1.0)) * rng.random()
        removed = rng.choice("bcc") if all(a.kind != "copy" for a in actors) else "c"
        actors.append(ActorPlan("remove", "remove", 1, begin_s, base=removed))
    faults, most = [], 5 if schedule.storage in LINKERS else 20  # links are few
    for _ in range(rng.randrange(3)):
        kind = rng.choice((*COPY_FAULTS, "pause", "pause"))
        faults.append(Fault(kind, "copy", rng.randrange(1, most), 20.0 * (kind == "pause")))
    return replace(schedule, actors=tuple(actors), faults=(*schedule.faults, *faults))


def packed(schedule: Schedule, from_state: int) -> Schedule:
    """Return the schedule with ``from_state`` added to the state of every other save."""
    saves = [actor.name for actor in schedule.actors if actor.kind == "save"]
    actors = [
        replace(a, state=a.state + from_state, base="") if a.name in saves[::2] else a
        for a in schedule.actors
    ]
    return replace(schedule, actors=tuple(actors))


def _actors(rng: random.Random) -> tuple[ActorPlan, ...]:
    ranks, actors, states = 4, [], iter(range(1, 5))
    while ranks and len(actors) < 3:
        world = rng.choice((1, 1, 2, 4)) if actors else rng.choice((1, 2, 4))
        world = min(world, ranks)
        ranks -= world
        begin_s = (
            0.0
            if not actors
            else rng.choice((0.0, 0.01, 0.05, 0.2, 1.0, 60.0, 4000.0)) * (0.5 + rng.random())
        )
        actors.append(
            ActorPlan(
                "save",
                f"save{len(actors) + 1}",
                world,
                begin_s,
                next(states),
                rng.random() < 0.5,
                world > 1 and rng.random() < 0.04,
            )
        )
        if rng.random() < 0.4:
            break
    for kind, likely in (
        ("load", 0.5),
        ("load", 0.3),
        ("prune", 0.2),
        ("copy", 0.25),
        ("copy", 0.1),
    ):
        if rng.random() < likely:
            world = min(2, 1 + (kind == "load" and rng.random() < 0.4))
            begin_s = rng.choice((0.0, 0.01, 0.1, 1.0, 100.0)) * rng.random()
            actors.append(ActorPlan(kind, f"{kind}{len(actors) + 1}", world, begin_s))
    return tuple(actors)


def _fault(rng: random.Random, kinds: tuple[str, ...], actors: int) -> Fault:
    kind, target = rng.choice(kinds), rng.choice(TARGETS)
    most = {
        "any": 150,
        "manifest": 12,
        "fate": 12,
        "marker": 16,
        "image": 80,
        "write": 60,
        "change": 30,
        "list": 4,
        "commit": 4,
        "claim": 5,
    }[target] * (1 + actors // 2)
    count = 1 + int(most * rng.random() ** (1 if target in ("commit", "claim") else 2))
    lasts = kind in ("pause", "hang", "cut", "store")
    if kind == "outage":
        return Fault(kind, target, count, rng.choice((0.05, 0.3, 1.0, 5.0)))
    return Fault(kind, target, count, rng.choice(PAUSES_S) * (0.5 + rng.random()) if lasts else 0.0)
