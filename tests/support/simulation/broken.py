"""Engines that are wrong on purpose, each in one way. They prove that the simulator can find
errors."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from ..mutants import Mutant, mutants_in
from .breaking import Broken, patches_of
from .remote import ObjectDriver
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


def _lend_newest(driver: ObjectDriver, key: str) -> bytes:
    """Lend the newest image of a rank, from any attempt."""
    path = driver._root + key
    folder, name = driver._root + "data/", path.rpartition("/")[2]
    images = [
        (modified_s, data)
        for path, (data, modified_s) in driver._server.objects.items()
        if path.startswith(folder) and path.rpartition("/")[2] == name
    ]
    driver._found(key)
    driver._world.copied(path)
    return max(images)[1]


BROKEN = [
    *map(_broken, mutants_in(Path(__file__).with_suffix(".diff"))),
    Broken(
        "the storage copies from a later version",
        lambda: iter([(ObjectDriver, "lend", _lend_newest)]),
        "copies",
        885,
    ),
]


def seeds_until_caught(
    engine: Broken, most: int, first: int = 0
) -> tuple[int, int, Failure | None]:
    """Return the number of schedules tried, the last seed, and the failure; None if ``most``
    schedules show none."""
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
