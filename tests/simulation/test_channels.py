"""Simulated trainers that publish weights, and engines that follow them.

Processes die, sleep and start again at any time, storage fails, and a second trainer publishes to the
same channel. The weights of an engine are exactly one published version at each moment.

``HOLDFAST_TEST_CHANNEL_SEEDS=10000`` looks further. A seed that fails is named, and replays.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from support.fresh import first_seed
from support.simulation.breaking import Broken, seeds_until_violation
from support.simulation.broken_channels import BROKEN_CHANNELS, schedule_of, violation
from support.simulation.channel_run import run, run_seed
from support.simulation.channels import installed

KNOWN = range(9)
TELLING = (25, 1062, 1063, 1204, 2118, 2226, 2464, 500444, 500641)
"""Seeds that exposed faults of the product: a rank alone in a call, folders lost in a power cut, a
deleted version published again, a head one version behind, a lease that was listed late, a second
publisher that got an error about an existing checkpoint instead."""
SEEDS = os.environ.get("HOLDFAST_TEST_CHANNEL_SEEDS")
FRESH_S = float(os.environ.get("HOLDFAST_TEST_SIM_FRESH_S", "2"))
"""Time spent on seeds that nobody has tried before."""
MOST = 300
"""Seeds within which a broken channel must be caught."""


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    """Run weight channels in simulations only."""
    with installed():
        yield


def checked(seed: int) -> Counter[str]:
    """Run a seed. Raises an error that names it."""
    try:
        return run_seed(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.timeout(36_000)
def test_every_engine_has_exactly_one_published_version(
    record_property: Callable[[str, object], None],
) -> None:
    """Versions only grow, none is published twice, and all needed files exist. In quiet conditions
    all engines end at the newest version, and old versions are deleted."""
    counts = Counter[str]()
    for seed in KNOWN:
        counts += checked(seed)
    first = first_seed()
    end_s, fresh = time.monotonic() + FRESH_S, 0
    while fresh < int(SEEDS or 0) or time.monotonic() < end_s:
        counts += checked(first + fresh)
        fresh += 1
    record_property("said", f"weight channels: {fresh:,} fresh seeds, from {first}")
    record_property("said", "  " + ", ".join(f"{n:,} {what}" for what, n in counts.most_common()))
    for what in ("update: done", "push: done", "push: SupersededError", "deleted versions"):
        assert counts[what], what


@pytest.mark.nightly(10)
def test_seeds_that_have_exposed_faults() -> None:
    """Schedules that broke a promise once keep it."""
    for seed in TELLING:
        checked(seed)


@pytest.mark.nightly(3)
def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed do the same, operation by operation."""
    for seed in (1, 2, 8):
        logs: list[list[str]] = [[], []]
        for log in logs:
            run_seed(seed, log.append)
        assert logs[0] == logs[1]


@pytest.mark.parametrize("broken", BROKEN_CHANNELS, ids=lambda broken: broken.name)
def test_a_broken_channel_breaks_what_is_there(broken: Broken) -> None:
    """Each channel that is wrong on purpose replaces existing parts."""
    with broken.engine():
        pass


@pytest.mark.nightly(16)
@pytest.mark.parametrize("broken", BROKEN_CHANNELS, ids=lambda broken: broken.name)
def test_a_broken_channel_is_caught(broken: Broken) -> None:
    """Each broken channel breaks a promise in a schedule that has exposed it before, or for a later
    seed. The correct channel keeps its promises there."""
    schedule = schedule_of(broken)
    run(schedule)
    with broken.engine():
        why = violation(schedule)
    if not why:
        _, why = seeds_until_violation(run_seed, broken, MOST)
        assert why, f"{broken.name}: not caught in {MOST} seeds"
