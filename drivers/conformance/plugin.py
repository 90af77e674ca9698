"""The kit's pytest plugin, registered through the ``pytest11`` entry point. Does nothing without
``--driver-uri``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--driver-uri`` and ``--driver-probe``."""
    group = parser.getgroup("holdfast", "holdfast: pytest --pyargs holdfast.drivers.conformance")
    group.addoption(
        "--driver-uri", metavar="URI", help="the storage to test; only a fresh prefix of it is used"
    )
    group.addoption(
        "--driver-probe", metavar="MODULE:CLASS", help="accesses that storage without the driver"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the session for the driver named on the command line."""
    uri = config.getoption("driver_uri")
    if uri is None:
        return
    import pytest

    from ...errors import HoldfastError
    from ..uri import redact
    from .report import Session

    worker = hasattr(config, "workerinput")  # of pytest-xdist
    try:
        session = Session(uri, config.getoption("driver_probe"), worker=worker)
    except HoldfastError as error:
        raise pytest.UsageError(f"--driver-uri {redact(uri)}: {error}") from error
    config.pluginmanager.register(session, "holdfast-conformance-session")
