"""Simulated runs that keep steps in memory, on one host and on several.

Hosts and processes die, sleep, and lose their network at any time. A restart resumes from one whole
step, no older than promised.

``HOLDFAST_TEST_KEEPER_SEEDS=10000`` looks further. A seed that fails is named, and replays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fresh import first_seed
from support.simulation.breaking import Broken, seeds_until_violation
from support.simulation.broken_keepers import BROKEN_ALONE, BROKEN_HOSTS
from support.simulation.keeper_hosts import FAULTS, FAULTS_ALONE, Hosts, run_alone, run_seed
from support.simulation.keeper_peers import installed
from support.simulation.keeper_promises import Violation

from holdfast.storage.arenas.label import GenerationId

Run = Callable[..., Counter[str]]

SEEDS = os.environ.get("HOLDFAST_TEST_KEEPER_SEEDS")
FRESH_S = float(os.environ.get("HOLDFAST_TEST_SIM_FRESH_S", "6"))
"""Time spent on seeds that nobody has tried before."""
MOST = 300
"""Seeds within which a broken keeper must be caught."""
EVENTS = ("resumed from memory", "flushed", "refused to go on")


def violation(run: Run, seed: int, counts: Counter[str]) -> str:
    """Return the violation found in a run with its seed, "" if it has none."""
    try:
        counts.update(run(seed))
    except Violation as problem:
        return f"seed {seed}: {problem}"
    return ""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("run", "fixed", "expected"),
    [
        pytest.param(run_alone, 150, {*FAULTS_ALONE}, id="one host"),
        pytest.param(run_seed, 75, {*FAULTS, "strike", "ruin"}, id="several hosts"),
    ],
)
def test_promises_hold_in_known_and_fresh_schedules(
    run: Run, fixed: int, expected: set[str], record_property: Callable[[str, object], None]
) -> None:
    """No slot in use is filled, and memory stays within its budget.

    While only processes die, a restart resumes from the last agreed step or a newer one. While no
    more hosts are lost than parity covers, it resumes from the last protected step or a newer one.
    Storage holds whole steps. If no intact step is found, all ranks refuse to resume. Once all is
    calm, steps are agreed and protected again.
    """
    counts: Counter[str] = Counter()
    fixed = int(SEEDS or fixed)
    for seed in range(fixed):
        assert violation(run, seed, counts) == ""
    first = first_seed()
    end_s, fresh = time.monotonic() + FRESH_S, 0
    while fresh < 10 or time.monotonic() < end_s:
        assert violation(run, first + fresh, counts) == ""
        fresh += 1
    record_property("said", f"{fixed:,} known seeds and {fresh:,} fresh ones, from {first}")
    record_property("said", ", ".join(f"{n:,} {what}" for what, n in counts.most_common()))
    assert {f"fault: {kind}" for kind in expected} <= counts.keys()
    assert counts["resumed"] > fixed
    assert min(counts[what] for what in EVENTS) > 0
    if run is run_seed:
        assert min(counts[what] for what in ("told guarded", "rebuilt")) > 0


@pytest.mark.parametrize("seed", [168, 348, 1472, 2677, 708179, 765849, 1088812])
def test_promises_hold_in_schedules_that_broke_them(seed: int) -> None:
    """Keepers that did not answer had other images than expected. A leader settled generations
    before all had reported. A flush dropped images that other hosts needed. A keeper dropped a step
    that a restart had chosen, because its trainers died before they entered the epoch."""
    assert violation(run_seed, seed, Counter()) == ""


class DamagedBeforeTheFlush(Hosts):
    """An image on one host changes when its step is protected, but not yet in storage. The job
    restarts after the keepers have noticed."""

    def found(self) -> tuple[int, int] | None:
        """Return the protected step, and the step that the job resumes from."""
        with installed(), self.loop.entered():
            try:
                self.budget_nbytes *= 4  # a rebuild takes memory
                self.placed = [self.add_host() for _ in range(self.size)]
                self.begin_job()
                self.slow_memory = self.drops = self.loses = self.doubles = 0
                self.flush_fails = 1.0
                self.seal_weight, self.work_weight, self.trainer_weight = 3.0, 4.0, 0.5
                id = self.protected_on_its_way()
                job = self.running
                assert job is not None
                victim = job.hosts[-1].keeper
                if id is None or victim is job.hosts[0].keeper:
                    return None
                victim.images(id)[0].memory.pieces[0] = None
                self.damaged.add((victim.host.name, id))
                self.flush_fails = 0.0
                self.rests = True
                for _ in range(2_000):
                    self.turn()
                if self.newest_stored() >= id.step:
                    return None  # it was written before the damage
                self.rests = False
                self.resizes = 0
                before = self.counts["resumed"]
                self.kill_all()
                while self.counts["resumed"] == before:
                    self.turn()
                return id.step, self.running.chosen or 0
            finally:
                self.end()

    def protected_on_its_way(self) -> GenerationId | None:
        """Take turns until a protected step waits to be written."""
        for _ in range(5_000):
            self.turn()
            id, promise = self.on_its_way(), self.guarded
            if id is not None and promise is not None and promise.id == id and promise.groups:
                return id
        return None


def test_damage_on_one_host_does_not_cost_a_protected_step() -> None:
    """Keepers with intact images retain them, so that the damaged image can be rebuilt."""
    found = [DamagedBeforeTheFlush(seed).found() for seed in range(12)]
    pairs = [pair for pair in found if pair is not None]
    assert len(pairs) >= 4
    assert all(resumed >= protected for protected, resumed in pairs)


def logs(seeds: int) -> list[list[str]]:
    """Return the logs of the first runs on several hosts."""
    found: list[list[str]] = [[] for _ in range(seeds)]
    for seed, log in enumerate(found):
        run_seed(seed, log.append)
    return found


@pytest.mark.nightly(13)
def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed have the same log, even in a process with another order of sets."""
    seeds = 3
    found = logs(seeds)
    assert min(map(len, found)) > 10
    here = Path(__file__)
    program = (
        "import json, logging, runpy; logging.disable(logging.CRITICAL); "
        f"print(json.dumps(runpy.run_path({str(here)!r})['logs']({seeds})))"
    )
    other = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(here.parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", program], env=other, capture_output=True, check=True, timeout=120
    )
    assert json.loads(run.stdout) == found


@pytest.mark.nightly(11)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("run", "broken"),
    [
        pytest.param(run, broken, id=broken.name)
        for run, several in ((run_alone, BROKEN_ALONE), (run_seed, BROKEN_HOSTS))
        for broken in several
    ],
)
def test_a_broken_keeper_is_caught(run: Run, broken: Broken) -> None:
    """Each broken keeper breaks a promise in one of the first schedules; the right one keeps it."""
    seed, why = seeds_until_violation(run, broken, MOST)
    assert why != "", f"{broken.name}: not caught by {MOST} seeds"
    assert violation(run, seed, Counter()) == ""
