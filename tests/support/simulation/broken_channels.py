"""Weight channels that are wrong on purpose, each in one way, with a schedule that exposes each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast.errors import HoldfastError

from ..mutants import Mutant, mutants_in
from .breaking import Broken, patches_of
from .channel_run import run
from .channel_schedule import ChannelActor, ChannelSchedule, drawn, overtaken
from .checker import Violation
from .schedule import Fault

_SEED = "seed "


_TRAINER = ChannelActor("publish", "trainer1", 1, 0.0, 14, 1.0)
_ENGINE = ChannelActor("follow", "engine1", 1, 1.5, 8, 1.0)


def _aimed(
    fault: Fault | None = None,
    engine: ChannelActor = _ENGINE,
    trainer: ChannelActor = _TRAINER,
    storage: str = "objects",
) -> ChannelSchedule:
    """Return a schedule of one trainer and one engine."""
    faults = () if fault is None else (fault,)
    anchor = 5 if fault is None else 3
    return ChannelSchedule(1, storage, 2, 4, anchor, (trainer, engine), faults, restless=0.02)


AIMED = {
    "a push waits for all who read": _aimed(Fault("pause", "read", 5, 200.0)),
    "a lease is put after the head is read": _aimed(
        Fault("pause", "other", 14, 110.0), trainer=replace(_TRAINER, steps=24, gap_s=5.0)
    ),
    "leases are ignored": _aimed(
        Fault("pause", "read", 8, 30.0),
        trainer=replace(_TRAINER, steps=24, gap_s=2.0),
        storage="posix",
    ),
    "a publisher whose files were deleted by another one is not told so": overtaken(4),
    "a patch to the anchor is applied to an older version, and nothing is verified": _aimed(
        engine=replace(_ENGINE, begin_s=3.5, gap_s=6.0)
    ),
    "tensors in use are verified with digests in the channel": _aimed(
        engine=replace(_ENGINE, steps=2, gap_s=100.0, into="nothing"),
        storage="posix",
    ),
}
"""Schedules that expose channels which few seeds expose, by name."""


def _broken(mutant: Mutant) -> Broken:
    """Return the channel of an entry."""
    seed = mutant.noticed_by.removeprefix(_SEED)
    first = 0 if mutant.says in AIMED else int(seed)
    return Broken(mutant.says, partial(patches_of, mutant.changes), first=first)


BROKEN_CHANNELS = [_broken(mutant) for mutant in mutants_in(Path(__file__).with_suffix(".diff"))]


def schedule_of(broken: Broken) -> ChannelSchedule:
    """Return a schedule that exposes the error of a channel."""
    return AIMED.get(broken.name) or drawn(broken.first)


def violation(schedule: ChannelSchedule) -> str:
    """Return the promise that a schedule breaks, or "". Other errors are raised: they only show a
    mistake in the change of the code."""
    try:
        run(schedule)
    except (Violation, HoldfastError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
