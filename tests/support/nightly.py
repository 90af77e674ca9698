"""Leaves slow tests out of a plain run, except a random share of them.

A test is marked ``nightly(seconds)`` if it is slow and its neighbours prove nearly the same, and
``drill`` if it kills or fills up real servers for minutes. ``make nightly`` runs all of them.
``.ci/run`` adds a random share of the nightly ones to its plain run, so that each of them runs now
and then. The share follows from the tested content. ``--nightly 600`` adds tests that together take
about 600 seconds of one core.

A test that is named on the command line always runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest

from .fresh import first_seed


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


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed, or take that of the process whose tests this one shares."""
    if config.option.nightly_seed is None:
        from_main = getattr(config, "workerinput", {})
        config.option.nightly_seed = from_main.get("nightly_seed", first_seed())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the seed to a process of pytest-xdist."""
    node.workerinput["nightly_seed"] = node.config.option.nightly_seed


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
    budget_s = _budget_s(config)
    costs_s = {_name(item): float(mark.args[0]) for item in items if (mark := _nightly(item))}
    chosen = share(costs_s, budget_s, config.option.nightly_seed)
    left_out = {
        item
        for item in items
        if (_nightly(item) and _name(item) not in chosen)
        or (item.get_closest_marker("drill") and budget_s < math.inf)
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _budget_s(config: pytest.Config) -> float:
    return math.inf if config.option.nightly == "all" else float(config.option.nightly)


def _name(item: pytest.Item) -> str:
    """Return the id of a test, without its parameters if these run together or not at all."""
    marks = getattr(getattr(item, "callspec", None), "marks", ())
    if any(mark.name == "nightly" for mark in marks):
        return item.nodeid
    return item.nodeid.partition("[")[0]


def _nightly(item: pytest.Item) -> pytest.Mark | None:
    return item.get_closest_marker("nightly")
