"""Runs on several hosts whose steps are kept in memory: whatever dies, sleeps, is lost or is cut off
when, a restart goes on from one whole step, and from none that is older than was promised.

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
from support.simulation.breaking import Broken, seeds_until_violation
from support.simulation.broken_keeper_hosts import BROKEN_KEEPER_HOSTS
from support.simulation.keeper_hosts import run_seed
from support.simulation.keepers import Violation

FIXED = int(os.environ.get("HOLDFAST_TEST_KEEPER_SEEDS", "90"))
FRESH_S = float(os.environ.get("HOLDFAST_TEST_SIM_FRESH_S", "6"))
"""How long seeds are tried that nobody has tried before."""
MOST = 300
"""Seeds until which a broken keeper must be caught."""
FAULTS = ("one", "all", "keeper", "lead", "host", "cut", "heal", "pause", "wake", "sleep", "flip")
EXPECTED = ("told guarded", "rebuilt", "flushed", "refused to go on")


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
    """Where processes alone die, nothing older is gone back to than the last step that was told
    agreed; where no more hosts are lost than are guarded against, nothing older than the last one
    that was told protected, where a host with a flipped bit counts as lost; where a load has
    failed and nothing whole is found, all ranks refuse to go on; storage holds whole steps; and once all is calm, steps are agreed and protected again."""
    counts: Counter[str] = Counter()
    for seed in range(FIXED):
        assert told(seed, counts) == ""
    first = int.from_bytes(os.urandom(4), "big")
    end_s, fresh = time.monotonic() + FRESH_S, 0
    while fresh < 10 or time.monotonic() < end_s:
        assert told(first + fresh, counts) == ""
        fresh += 1
    record_property("said", f"hosts: {FIXED:,} known seeds and {fresh:,} fresh ones, from {first}")
    record_property("said", ", ".join(f"{n:,} {what}" for what, n in counts.most_common()))
    assert {f"fault: {kind}" for kind in (*FAULTS, "full", "strike", "ruin")} <= counts.keys()
    assert counts["resumed"] > FIXED
    assert counts["resumed from memory"] > FIXED / 2
    assert min(counts[what] for what in EXPECTED) > 0


def logs(seeds: int) -> list[list[str]]:
    """What happens in the first runs."""
    found: list[list[str]] = [[] for _ in range(seeds)]
    for seed, log in enumerate(found):
        run_seed(seed, log.append)
    return found


def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed do the same, to the last line of their logs: also in a process in which
    sets of names have another order."""
    seeds = 4
    found = logs(seeds)
    assert found == logs(seeds)
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("broken", BROKEN_KEEPER_HOSTS, ids=lambda broken: broken.name)
def test_a_broken_keeper_is_caught(broken: Broken) -> None:
    """Each keeper that is wrong on purpose breaks a promise in one of the first schedules, which
    the right one keeps."""
    seed, why = seeds_until_violation(run_seed, broken, MOST)
    assert why != "", f"{broken.name}: not caught by {MOST} seeds"
    assert told(seed, Counter()) == ""
