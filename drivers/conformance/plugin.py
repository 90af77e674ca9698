"""The kit's options, for pytest: its entry point of group ``pytest11``. Adds these and does nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--driver-uri`` and ``--driver-probe``."""
    group = parser.getgroup("holdfast", "holdfast: pytest --pyargs holdfast.drivers.conformance")
    group.addoption("--driver-uri", metavar="URI", help="the storage to try; only a fresh prefix of it is used")
    group.addoption("--driver-probe", metavar="MODULE:CLASS", help="reaches that storage without the driver")
