"""Reruns a failed test that depends on the clock, if the machine stood still during it.

A test marked ``clocked`` sets deadlines of a few seconds or less, or asserts that an operation took
no longer than that. It proves nothing if the machine gave this process no time for as long. So a
thread watches the clock all the time. A clocked test that failed while that thread was late runs
again, up to four times. A failure on a machine that kept time stands at once, and so does any
failure of an unmarked test.
"""

from __future__ import annotations

import threading
import time

import pytest

TICK_S = 0.02
LATE_S = 0.05
"""A tick that is this late means that the process was kept from running. With processors to spare,
a tick is late by a fiftieth of that."""
RERUNS = 4


class Watch:
    """A thread that measures how late its ticks come."""

    def __init__(self) -> None:
        self._late_s = 0.0
        self._started = False

    def restart(self) -> None:
        """Reset the measured delay. The first call starts the thread."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._tick, name="watch", daemon=True).start()
        self._late_s = 0.0

    def stood_still(self) -> bool:
        """Return whether this process was kept from running since `restart`."""
        return self._late_s >= LATE_S

    def _tick(self) -> None:
        while True:
            began_s = time.monotonic()
            time.sleep(TICK_S)
            self._late_s = max(self._late_s, time.monotonic() - began_s - TICK_S)


WATCH = Watch()


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --once."""
    parser.addoption(
        "--once", action="store_true", help="run no test again, however busy the machine is"
    )


@pytest.hookimpl
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark clocked tests for reruns."""
    if config.getoption("once"):
        return
    for item in items:
        if item.get_closest_marker("clocked"):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS, condition=WATCH.stood_still))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restart the watch before each run of a clocked test."""
    if item.get_closest_marker("clocked"):
        WATCH.restart()
