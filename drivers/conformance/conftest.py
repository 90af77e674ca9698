"""Makes places for trials, applies what the driver declares, and reports."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.report import OUTLIVES, Session


def _session(config: pytest.Config) -> Session | None:
    session: Session | None = config.pluginmanager.get_plugin("holdfast-conformance-session")
    return session


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An empty root. When the trial is over its drivers are closed, and must then have let go of
    everything."""
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
        folder = Path(__file__).parent
        session.collected((item.nodeid for item in items if item.path.parent == folder), folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure that the driver declares is one that was expected."""
    report = yield
    if session := _session(item.config):
        session.judge(item, report)
    return report
