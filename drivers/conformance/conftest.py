"""Fixtures and hooks: places for trials, declared deviations, and the report."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.report import Session
from holdfast.drivers.contract import Driver


def _session(config: pytest.Config) -> Session | None:
    session: Session | None = config.pluginmanager.get_plugin("holdfast-conformance-session")
    return session


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Provide an empty root. After the trial, close its drivers and fail if they left anything
    open."""
    session = _session(request.config)
    if session is None:
        pytest.skip("which driver? pytest --pyargs holdfast.drivers.conformance --driver-uri URI")
    with session.place() as place:
        yield place


@pytest.fixture
def driver(place: Place) -> Driver:
    """Open a driver at the place."""
    return place.open()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Record the collected trials."""
    if session := _session(config):
        folder = Path(__file__).parent
        session.collected((item.nodeid for item in items if item.path.parent == folder), folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn failures that the driver declares as deviations into expected ones."""
    report = yield
    if session := _session(item.config):
        session.judge(item, report)
    return report
