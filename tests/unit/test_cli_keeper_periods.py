"""``holdfast keeper periods``: what it prints, for people and for programs, and what it refuses."""

from __future__ import annotations

import pytest
from support.commands import run, run_json

MEMORY = ("--cost=memory=20ms", "--rate=memory=1/2h")
LEVELS = ("--step=2s", *MEMORY, "--cost=local=1s", "--rate=local=2/48h")


def test_periods_are_printed() -> None:
    """The table has a line for each level, in the order of costs."""
    _, _, memory, local = run("keeper", "periods", *LEVELS).stdout.rstrip().splitlines()
    assert memory.split() == ["memory", "20", "ms", "1/2", "h", "17", "s", "16", "s", "8", "0.24%"]
    assert " ".join(local.split()) == "local 1 s 1/24 h 6.92 min 6.93 min 208 0.48%"


def test_periods_for_programs() -> None:
    """One document, with times in seconds."""
    found = run_json("keeper", "periods", *LEVELS)
    assert found["step_s"] == 2.0
    assert [level["name"] for level in found["levels"]] == ["memory", "local"]
    memory = found["levels"][0]
    assert memory["cost_s"] == pytest.approx(0.02)
    assert memory["rate_per_s"] == pytest.approx(1 / 7200)
    assert (memory["every_steps"], memory["every_s"]) == (8, 16.0)
    assert memory["best_s"] == pytest.approx(16.95, abs=0.01)
    assert memory["lost_part"] == pytest.approx(0.00236, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step=2s", "--cost=a=1s", "--rate=b=1/1h"], "the level a has no --rate"),
        (["--step=2s", "--cost=1s", "--rate=a=1/1h"], "--cost 1s names no level"),
        (["--step=2s", "--cost=a=1s", "--cost=a=2s", "--rate=a=1/1h"], "twice for the level a"),
        (["--step=2s", "--cost=a=1s", "--rate=a=2h"], "--rate: '2h' is not a rate"),
        (["--step=2s", "--cost=a=1s", "--rate=a=0/1h"], "a: a rate of 0.0 per second"),
        (["--step=soon", "--cost=a=1s", "--rate=a=1/1h"], "--step: 'soon' is not a duration"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    """Status 2, nothing on stdout, and a message that names it."""
    printed = run("keeper", "periods", *arguments, status=2)
    assert printed.stdout == ""
    assert message in printed.stderr
