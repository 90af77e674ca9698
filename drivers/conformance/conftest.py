"""Makes places for trials, applies what the driver declares, and reports."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.report import OUTLIVES, Session
from holdfast.drivers.uri import redact
from holdfast.errors import HoldfastError


def pytest_configure(config: pytest.Config) -> None:
    """Begin the session of the driver that the command line names."""
    uri = config.getoption("driver_uri", None)
    if uri is not None:
        try:
            session = Session(uri, config.getoption("driver_probe"))
        except HoldfastError as error:
            raise pytest.UsageError(f"--driver-uri {redact(uri)}: {error}") from error
        config.pluginmanager.register(session, "holdfast-conformance-session")


def _session(config: pytest.Config) -> Session | None:
    session: Session | None = config.pluginmanager.get_plugin("holdfast-conformance-session")
    return session


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An empty root. When the trial is over its drivers are closed, and must then have let go of everything."""
    session = _session(request.config)
    if session is None:
        pytest.skip("which driver? pytest --pyargs holdfast.drivers.conformance --driver-uri URI")
    with session.place() as (held, place):
        yield place
    if OUTLIVES not in session.deviations and (left := held.outlived_by()):
        pytest.fail(f"these outlive close(): {', '.join(left)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which trials there are."""
    if session := _session(config):
        session.collected(items, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count the outcome; a failure that the driver declares is one that was expected."""
    report = yield
    if session := _session(item.config):
        session.judge(item, report)
    return report
