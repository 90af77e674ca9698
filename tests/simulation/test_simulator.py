"""Runs of the real engine on simulated machines: its promises hold under every seed's schedule.

`make sim SEEDS=100000` looks further; `make sim SEED=n` replays one with its log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator

import pytest
from support.fresh import first_seed
from support.simulation.broken import BROKEN, Broken, seeds_until_caught
from support.simulation.engine import installed
from support.simulation.found import SCHEDULES
from support.simulation.loop import Crashed
from support.simulation.run import Failure, Tally, bury, run
from support.simulation.savers import BROKEN as BROKEN_SAVERS
from support.simulation.savers import with_savers
from support.simulation.schedule import Fault, Schedule, drawn, packed
from support.simulation.states import PACKED
from support.simulation.world import World

from holdfast.errors import NotFoundError

FIXED = int(os.environ.get("HOLDFAST_TEST_SIM_SEEDS", "36"))
TELLING = (103,)
"""Further seeds that expose what few others do."""
FRESH_S = float(os.environ.get("HOLDFAST_TEST_SIM_FRESH_S", "4"))
"""Seconds to spend on fresh seeds."""
MOST = 300
"""Number of schedules within which a broken engine must be caught."""
QUICK = [broken for broken in BROKEN if broken.seed is not None]
"""The other broken engines take hundreds of schedules: `make sim-broken`."""


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """Run the engine in simulations only, without its warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with installed():
        yield
    logging.disable(before)


def told(failure: Failure | None) -> str:
    """Return what failed, and how to reproduce it."""
    return "" if failure is None else f"{failure.why}: make sim SEED={failure.schedule.seed}"


def test_promises_hold_in_known_and_in_fresh_schedules(
    record_property: Callable[[str, object], None],
) -> None:
    """A reader finds the previous or the new checkpoint, whole. Acknowledged saves survive. No
    process hangs. The next save works and leaves no other files."""
    tally = Tally()
    for seed in (*range(FIXED), *TELLING):
        assert told(run(drawn(seed), tally)) == ""
    first = first_seed()
    end_s, fresh = time.monotonic() + FRESH_S, 0
    while fresh < 20 or time.monotonic() < end_s:
        assert told(run(drawn(first + fresh), tally)) == ""
        fresh += 1
    record_property(
        "said", f"simulator: {FIXED:,} known seeds and {fresh:,} fresh ones, from {first}"
    )
    for line in tally.lines():
        record_property("said", f"  {line}")
    assert tally.faults
    assert tally.outcomes["save: done"]
    assert tally.copies
    assert tally.schedules > 5 * tally.runs  # all processes die at many moments of a run


@pytest.mark.nightly(4)
def test_promises_hold_where_images_are_compressed() -> None:
    """Every other save compresses, so that one form of images replaces the other."""
    tally = Tally()
    for seed in range(FIXED // 4):
        assert told(run(packed(drawn(seed), PACKED), tally)) == ""
    assert tally.outcomes["save: done"]


def test_promises_hold_where_savers_write() -> None:
    """Savers outlive the trainers of half of the jobs and commit for them, or die, too."""
    tally = Tally()
    for seed in range(FIXED // 4):
        assert told(run(with_savers(drawn(seed)), tally)) == ""
    assert tally.finished


@pytest.mark.nightly(3)
@pytest.mark.parametrize("broken", BROKEN_SAVERS, ids=lambda broken: broken.name)
def test_the_simulator_catches_a_broken_saver(broken: Broken) -> None:
    """A mixture, or a manifest without its data, is noticed."""
    assert broken.seed is not None
    with broken.engine():
        failure = run(with_savers(drawn(broken.seed)))
    assert failure is not None
    assert failure.why.startswith("Violation")


def logged(schedule: Schedule) -> list[str]:
    """Return the log of a run."""
    lines: list[str] = []
    run(schedule, log=lines.append)
    return lines


@pytest.mark.nightly(4)
def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed do the same, operation by operation. So does a schedule with recorded
    delays."""
    for seed in range(3):
        assert logged(drawn(seed)) == logged(drawn(seed))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_engine_breaks_what_is_there(broken: Broken) -> None:
    """Each broken engine replaces existing parts, even one that takes too long to catch here."""
    with broken.engine():
        pass


@pytest.mark.nightly(18)
@pytest.mark.parametrize("broken", QUICK, ids=lambda broken: broken.name)
def test_a_broken_engine_is_caught(broken: Broken) -> None:
    """Each engine that is wrong on purpose breaks a promise: in a schedule that has shown it
    before, or in one of the first."""
    _, _, failure = seeds_until_caught(broken, 1, broken.seed or 0)
    if failure is None:
        _, _, failure = seeds_until_caught(broken, MOST)
    assert failure is not None, f"{broken.name}: not caught in {MOST} schedules"
    assert run(failure.schedule) is None, "an engine that is not broken fails likewise"


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rare_schedule_catches_the_engine_that_it_was_found_for(name: str) -> None:
    """The correct engine keeps its promises in it."""
    broken = next(one for one in BROKEN if one.name == name)
    assert run(SCHEDULES[name]) is None
    with broken.engine():
        assert run(SCHEDULES[name]) is not None


@pytest.mark.parametrize("operation", range(1, 14))
def test_folders_made_by_a_process_that_died_become_durable(operation: int) -> None:
    """A put survives a power cut, although another process made its folders and died at any moment,
    and the folders were read before."""
    faults = (Fault("die", "any", operation),)
    world = World(Schedule(1, "posix", 2, before=False, actors=(), faults=faults, delays={}))
    world.be_host()

    async def first() -> None:
        await world.driver("run/a/b").put("data/x", b"first")

    async def second() -> None:
        driver = world.driver("run/a/b")
        with contextlib.suppress(NotFoundError):
            await driver.stat("y")
        await driver.put("y", b"second")

    for call in (first, second):
        with contextlib.suppress(Crashed):
            task = world.loop.spawn(process := world.process(call.__name__, "host"), call())
            world.loop.run_until(
                lambda task=task, process=process: task.done() or not process.alive
            )
    world.power_cut("host")
    assert world.file("run/a/b/y") == b"second"
    bury(world)
