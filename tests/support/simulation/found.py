"""Rare schedules, shortened: the correct engine always passes them, a broken one fails.

The first schedule and that of the prune exposed real bugs: the engine lacked that step.
"""

from __future__ import annotations

from .schedule import ActorPlan, Fault, Schedule

ONE = (ActorPlan("save", "save1", 1, 0.0, 1),)


def then(begin_s: float) -> tuple[ActorPlan, ...]:
    """Return the first save, and another one that begins at ``begin_s``."""
    return (*ONE, ActorPlan("save", "save2", 1, begin_s, 2))


SCHEDULES = {
    "what was replaced is deleted at once, also while its own leader may try its put again": Schedule(
        454515, "objects", 2, True, then(0.0612), (Fault("outage", "manifest", 3, 1.0),), delays={}
    ),
    "whether what was replaced is settled is asked after the put": Schedule(
        99, "objects", 2, True, then(0.099), (Fault("outage", "manifest", 3, 1.0), Fault("pause", "marker", 9, 20.0)), 0.02,
        delays={},
    ),
    "the file is renamed before its fsync": Schedule(
        13, "posix", 2, True, ONE, (Fault("power", "commit", 4),), delays={}
    ),
    "a failed fsync is tried again": Schedule(
        412885, "posix", 2, True, ONE, (Fault("fsync", "any", 62), Fault("power", "any", 120)),
        delays={15: 0.05, 16: 0.005, 18: 0.05, 30: 0.002},
    ),
    "a failed put of the manifest counts as not done": Schedule(
        1, "objects", 2, True, ONE, (Fault("outage", "commit", 1, 2.0),), delays={}
    ),
    "the error of a chunk's write is dropped": Schedule(
        15, "posix", 2, True, ONE, (Fault("eio", "image", 3),), delays={}
    ),
    "nobody looks whether the storage has kept the manifest": Schedule(
        1, "objects", 2, True, ONE, (Fault("forgets", "commit", 1),), delays={}
    ),
    "an exclusive put that is tried again takes every taken key for its own": Schedule(
        14, "objects", 2, True, then(0.0688659778434676), (Fault("refused", "claim", 1),), delays={16: 0.01, 20: 0.02}
    ),
    "a pruning puts no prune lock": Schedule(
        13, "objects", 2, True, (*ONE, ActorPlan("prune", "prune1", 1, 0.0)), (Fault("hang", "manifest", 5, 0.1),), delays={}
    ),
    "a copy is made from what is the base's checkpoint by then": Schedule(
        1, "objects, copies", 8, True,
        (ActorPlan("save", "save1", 2, 0.0, 1), ActorPlan("save", "save2", 2, 0.05, 3, base="a")),
        (Fault("pause", "copy", 1, 20.0), Fault("pause", "commit", 1, 5.0), Fault("die", "manifest", 15)), 0.02, delays={},
    ),
    "a rank compares with what is the base's checkpoint by then, and copies from the leader's": Schedule(
        1, "objects, copies", 8, True,
        (ActorPlan("save", "save1", 2, 0.0, 1), ActorPlan("save", "save2", 2, 0.05, 4, base="a")),
        (Fault("pause", "commit", 1, 5.0), Fault("pause", "manifest", 6, 20.0), Fault("die", "manifest", 8)), 0.02, delays={},
    ),
    "the marker is deleted last, and nobody looks for the images": Schedule(
        535707, "objects", 2, False, then(0.1192790348348545), (), 0.6, delays={24: 0.2, 42: 0.2, 44: 0.2, 52: 1.0}
    ),
}  # fmt: skip
"""Schedules by the broken engine that each exposes."""
