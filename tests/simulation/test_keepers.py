"""Runs whose steps are kept in memory: whatever dies, sleeps or flips when, a restart goes on from
one whole step, and from none that is older than the last one told agreed.

``HOLDFAST_TEST_KEEPER_SEEDS=100000`` looks further. A seed that fails is named, and replays.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from support.simulation.breaking import Broken, seeds_until_violation
from support.simulation.broken_keepers import BROKEN_KEEPERS
from support.simulation.keepers import Violation, run_seed

FIXED = int(os.environ.get("HOLDFAST_TEST_KEEPER_SEEDS", "300"))
FRESH_S = float(os.environ.get("HOLDFAST_TEST_SIM_FRESH_S", "6"))
"""How long seeds are tried that nobody has tried before."""
MOST = 300
"""Seeds until which a broken keeper must be caught."""


def told(seed: int, counts: Counter[str]) -> str:
    """What is wrong with a run, and its seed."""
    try:
        counts.update(run_seed(seed))
    except Violation as violation:
        return f"seed {seed}: {violation}"
    return ""


@pytest.mark.timeout(3600)
def test_promises_hold_in_known_and_in_fresh_schedules(
    record_property: Callable[[str, object], None],
) -> None:
    """No slot in use is filled; memory stays within its budget; an older epoch gets nothing; what
    is agreed is whole; a restart finds one whole step that is none before the last one agreed, and
    on no line that was left; storage holds whole steps; and once all is calm, steps are agreed
    again."""
    counts: Counter[str] = Counter()
    for seed in range(FIXED):
        assert told(seed, counts) == ""
    first = int.from_bytes(os.urandom(4), "big")
    end_s, fresh = time.monotonic() + FRESH_S, 0
    while fresh < 20 or time.monotonic() < end_s:
        assert told(first + fresh, counts) == ""
        fresh += 1
    said = f"keepers: {FIXED:,} known seeds and {fresh:,} fresh ones, from {first}"
    record_property("said", said)
    record_property("said", ", ".join(f"{n:,} {what}" for what, n in counts.most_common()))
    faults = {what for what in counts if what.startswith("fault: ")}
    assert faults == {
        f"fault: {kind}" for kind in ("one", "all", "keeper", "pause", "wake", "flip")
    }
    assert counts["resumed from memory"] > FIXED
    assert counts["flushed"] > FIXED / 2


def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed do the same, to the last line of their logs."""
    for seed in range(5):
        logs: list[list[str]] = [[], []]
        for log in logs:
            run_seed(seed, log.append)
        assert logs[0] == logs[1]
        assert len(logs[0]) > 10


@pytest.mark.parametrize("broken", BROKEN_KEEPERS, ids=lambda broken: broken.name)
def test_a_broken_keeper_is_caught(broken: Broken) -> None:
    """Each keeper that is wrong on purpose breaks a promise in one of the first schedules, which
    the right one keeps."""
    seed, why = seeds_until_violation(run_seed, broken, MOST)
    assert why != "", f"{broken.name}: not caught by {MOST} seeds"
    assert told(seed, Counter()) == ""
