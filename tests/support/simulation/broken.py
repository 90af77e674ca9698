"""Engines that are wrong on purpose, each in one way. A simulator that does not catch them proves
nothing."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from ..mutants import Mutant, mutants_in
from .breaking import Broken, patches_of
from .run import Failure, run
from .schedule import drawn

__all__ = ["BROKEN", "Broken", "seeds_until_caught"]

_NOTICED = re.compile(r"(?:seed (?P<seed>\d+)|rare)(?: on (?P<storages>\w+))?")


def _broken(mutant: Mutant) -> Broken:
    """Return the engine of an entry."""
    noticed = _NOTICED.fullmatch(mutant.noticed_by)
    assert noticed is not None, mutant.noticed_by
    seed = None if noticed["seed"] is None else int(noticed["seed"])
    patches = partial(patches_of, mutant.changes)
    return Broken(mutant.says, patches, noticed["storages"] or "", seed)


BROKEN = [_broken(mutant) for mutant in mutants_in(Path(__file__).with_suffix(".diff"))]


def seeds_until_caught(
    engine: Broken, most: int, first: int = 0
) -> tuple[int, int, Failure | None]:
    """Return the number of schedules tried, the last seed, and the failure; None if none of ``most``
    schedules has one."""
    tried, seed = 0, first
    with engine.engine():
        while True:
            schedule = drawn(seed)
            if engine.storages in schedule.storage:
                tried += 1
                failure = run(schedule)
                if failure is not None or tried >= most:
                    return tried, seed, failure
            seed += 1
