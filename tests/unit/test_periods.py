"""The interval between saves, in steps: Young's and Daly's periods, and the command for them."""

from __future__ import annotations

import math

import pytest
from support.commands import run, run_json

from holdfast.planner.periods import Level, period_s, periods

HOUR_S = 3600.0


def test_young_where_saves_are_short() -> None:
    """20 ms per save and one failure in two hours: close to √(2·C/λ)."""
    young_s = math.sqrt(2 * 0.02 * 2 * HOUR_S)
    assert period_s(0.02, 1 / (2 * HOUR_S)) == pytest.approx(young_s, rel=2e-3)


@pytest.mark.parametrize("cost_s", [0.1, 30.0, 600.0])
def test_no_other_period_loses_much_less(cost_s: float) -> None:
    """Daly's period loses at most a thousandth more than the best one, found by trying."""
    rate = 1 / HOUR_S

    def lost_part(every_s: float) -> float:
        return 1 - rate * every_s / math.expm1(rate * (every_s + cost_s))

    best = min(lost_part(1.01**n) for n in range(1200))
    assert lost_part(period_s(cost_s, rate)) == pytest.approx(best, abs=1e-3)


def test_saves_that_take_longer_than_failures_are_apart() -> None:
    """There is no good answer, and the period is the time between failures."""
    assert period_s(3 * HOUR_S, 1 / HOUR_S) == HOUR_S


def test_periods_are_whole_steps() -> None:
    """Periods are whole steps, and a slower level's period is a multiple of the faster one's."""
    given = (("memory", 0.02, 2), ("local", 1.0, 24), ("remote", 8.0, 7 * 24))
    levels = [Level(name, cost_s, 1 / (hours * HOUR_S)) for name, cost_s, hours in given]
    found = periods(levels, step_s=2.0)
    assert [one.every_steps for one in found] == [8, 208, 1456]
    assert [one.every_s for one in found] == [16.0, 416.0, 2912.0]
    assert [round(one.best_s) for one in found] == [17, 415, 3105]
    assert [f"{one.lost_part:.2%}" for one in found] == ["0.24%", "0.48%", "0.51%"]


def test_a_save_that_costs_nothing_is_made_at_every_step() -> None:
    """A save that costs nothing, or has a period below a step, is made at every step."""
    free, cheap = periods([Level("a", 0.0, 1e-3), Level("b", 0.001, 1.0)], step_s=10.0)
    assert (free.every_steps, free.best_s) == (1, 0.0)
    assert cheap.every_steps == 1


def test_what_is_no_level_is_refused() -> None:
    """An invalid level is refused by name."""
    with pytest.raises(ValueError, match="memory: a cost of -1 seconds"):
        Level("memory", -1, 1.0)
    with pytest.raises(ValueError, match="memory: a rate of 0 per second"):
        Level("memory", 1, 0)
    with pytest.raises(ValueError, match="a step of 0 seconds"):
        periods([Level("memory", 1, 1.0)], 0)
    with pytest.raises(ValueError, match="two levels have the same name"):
        periods([Level("memory", 1, 1.0)] * 2, 1.0)


# ``holdfast keeper periods``


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
