"""``holdfast keeper periods``: how often to save to each level of storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from ...core.units import parse_duration
from ...errors import UsageError
from ...planner.periods import Level, Period
from ...planner.periods import periods as planned_periods
from ..commands import print_json
from ..tables import Table

T = TypeVar("T")

_TITLES = ("level", "cost", "failures", "best", "every", "steps", "lost")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(.+)", re.ASCII)


def periods(step: str, cost: Sequence[str], rate: Sequence[str], *, json_output: bool) -> int:
    """Print the period of each level, and return 0. Raises UsageError for bad arguments."""
    step_s = _of("--step", step, parse_duration)
    costs = _by_level("--cost", cost, parse_duration)
    rates = _by_level("--rate", rate, _rate_per_s)
    if unpaired := costs.keys() ^ rates.keys():
        name = min(unpaired)
        missing = "--rate" if name in costs else "--cost"
        raise UsageError(
            f"the level {name} has no {missing}", advice="Give --cost and --rate for each level."
        )
    try:
        levels = [Level(name, cost_s, rates[name]) for name, cost_s in costs.items()]
        found = planned_periods(levels, step_s)
    except ValueError as error:
        raise UsageError(str(error), advice="Times and rates are above 0.") from error
    if json_output:
        print_json({"step_s": step_s, "levels": [_document(one) for one in found]})
    else:
        Table("Periods", _TITLES, [_row(one) for one in found], left=("level",)).print()
    return 0


def _by_level(option: str, given: Sequence[str], parse: Callable[[str], T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(
                f"{option} {text} names no level", advice=f"Write {option} LEVEL={text}."
            )
        if name in found:
            raise UsageError(
                f"{option} is given twice for the level {name}", advice="Give it once."
            )
        found[name] = _of(option, value, parse)
    return found


def _of(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(
            f"{option}: {error}", advice="Times are 20ms, 1.5s, 30min or 2h; rates are 1/2h."
        ) from error


def _rate_per_s(text: str) -> float:
    """Parse a rate such as ``1/2h`` into failures per second. Raises ValueError."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a rate")
    seconds = parse_duration(match[2])
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a rate")
    return float(match[1]) / seconds


def _document(period: Period) -> dict[str, object]:
    found = asdict(period)
    return {**found.pop("level"), **found}


def _row(period: Period) -> tuple[str, ...]:
    return (
        period.level.name,
        _time_text(period.level.cost_s),
        f"1/{_time_text(1 / period.level.rate_per_s)}",
        _time_text(period.best_s),
        _time_text(period.every_s),
        f"{period.every_steps:,}",
        f"{period.lost_part:.2%}",
    )


def _time_text(seconds: float) -> str:
    """Format a time with three digits, in the largest unit that it reaches."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    for nseconds, unit in ((3600, "h"), (60, "min")):
        if seconds >= nseconds:
            return f"{seconds / nseconds:.3g} {unit}"
    return f"{seconds:.3g} s"
