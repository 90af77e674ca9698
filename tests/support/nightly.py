"""Leaves slow tests out of a plain run, except a random share of them.

A test is marked ``nightly(seconds)`` if it is slow and its neighbours prove nearly the same, and
``drill`` if it kills or fills up real servers for minutes. ``make nightly`` runs all of them.
``.ci/run`` adds a random share to its plain run, so that each of them runs now and then:
``--nightly 600`` adds tests that take about 600 seconds of one core together.

A test that is named on the command line always runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

__all__ = ["DRILL_S", "share"]

DRILL_S = 30.0
"""The cost in seconds of one core that is assumed for a drill."""


def share(costs_s: Mapping[str, float], budget_s: float, seed: int) -> set[str]:
    """Choose names at random until their costs reach ``budget_s``."""
    names = sorted(costs_s)
    random.Random(seed).shuffle(names)
    chosen = set[str]()
    for name in names:
        if budget_s <= 0:
            break
        chosen.add(name)
        budget_s -= costs_s[name]
    return chosen


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --nightly and --nightly-seed."""
    parser.addoption(
        "--nightly",
        metavar="SECONDS|all",
        default="0",
        help="run slow tests, too: all, or a random share that takes so long on one core",
    )
    parser.addoption(
        "--nightly-seed", type=int, metavar="N", help="choose the share of an earlier run"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed before pytest-xdist passes the options on to its workers."""
    if config.option.nightly_seed is None:
        config.option.nightly_seed = random.randrange(1 << 32)


@pytest.hookimpl
def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print how to repeat the run."""
    if _budget_s(config) in (0, math.inf):
        return []
    return [
        f"nightly: --nightly {config.option.nightly} --nightly-seed {config.option.nightly_seed}"
    ]


@pytest.hookimpl
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests that are not chosen."""
    if any("::" in argument for argument in config.args):
        return
    slow = {item: cost_s for item in items if (cost_s := _cost_s(item)) is not None}
    costs_s = dict[str, float]()
    for item, cost_s in slow.items():
        # The mark of a nightly test covers all its parameters; each drill counts for itself.
        drill = item.get_closest_marker("drill")
        costs_s[_name(item)] = cost_s + (costs_s.get(_name(item), 0.0) if drill else 0.0)
    chosen = share(costs_s, _budget_s(config), config.option.nightly_seed)
    left_out = {item for item in slow if _name(item) not in chosen}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _budget_s(config: pytest.Config) -> float:
    return math.inf if config.option.nightly == "all" else float(config.option.nightly)


def _name(item: pytest.Item) -> str:
    """Return the test's id without its parameters: these run together or not at all."""
    return item.nodeid.partition("[")[0]


def _cost_s(item: pytest.Item) -> float | None:
    if nightly := item.get_closest_marker("nightly"):
        return float(nightly.args[0])
    return DRILL_S if item.get_closest_marker("drill") else None
