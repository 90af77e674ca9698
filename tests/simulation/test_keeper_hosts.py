"""Runs on several hosts whose steps are kept in memory: whatever dies, sleeps, is lost or is cut off
when, a restart goes on from one whole step, and from none that is older than was promised.

A plain run tries schedules that are known. ``HOLDFAST_TEST_KEEPER_SEEDS=1000`` looks further, and
``HOLDFAST_TEST_KEEPER_FRESH_S=60`` among those that nobody has tried. A seed that fails is named, and
replays.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
from support.simulation.keeper_hosts import run_seed
from support.simulation.keepers import Violation

FIXED = int(os.environ.get("HOLDFAST_TEST_KEEPER_SEEDS", "100"))
FRESH_S = float(os.environ.get("HOLDFAST_TEST_KEEPER_FRESH_S", "0"))
"""How long seeds are tried that nobody has tried before."""


def told(seed: int, counts: Counter[str]) -> str:
    """What is wrong with a run, and its seed."""
    try:
        counts.update(run_seed(seed))
    except Violation as violation:
        return f"seed {seed}: {violation}"
    return ""


@pytest.mark.timeout(3600)
def test_promises_hold_in_known_schedules(
    record_property: Callable[[str, object], None],
) -> None:
    """Where processes alone die, nothing older is gone back to than the last step that was told
    agreed; where no more hosts are lost than are guarded against, nothing older than the last one
    that was told protected; storage holds whole steps; and once all is calm, steps are agreed and
    protected again."""
    counts: Counter[str] = Counter()
    for seed in range(FIXED):
        assert told(seed, counts) == ""
    first = int.from_bytes(os.urandom(4), "big")
    end_s, fresh = time.monotonic() + FRESH_S, 0
    while time.monotonic() < end_s:
        assert told(first + fresh, counts) == ""
        fresh += 1
    record_property("said", f"hosts: {FIXED:,} known seeds and {fresh:,} fresh ones, from {first}")
    record_property("said", ", ".join(f"{n:,} {what}" for what, n in counts.most_common()))
    assert counts["resumed"] > FIXED


def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed do the same, to the last line of their logs."""
    for seed in range(2):
        logs: list[list[str]] = [[], []]
        for log in logs:
            run_seed(seed, log.append)
        assert logs[0] == logs[1]
        assert len(logs[0]) > 10
