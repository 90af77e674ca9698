"""Selects the light tests for ``make unit``: they need no torch, no process and no server.

With ``--light``, pytest collects only the files listed here, and leaves out the tests marked
``heavy``. It fails any other test that imports torch, starts a process or binds a socket. So an
error in the list cannot go unnoticed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

FILES = frozenset(
    {
        "property/test_parity.py",
        "property/test_planner_coverage.py",
        "property/test_planner_loading.py",
        "property/test_planner_saving.py",
        "property/test_storage_executor.py",
        "property/test_storage_scheduler.py",
        "unit/test_checks.py",
        "unit/test_cli_drivers.py",
        "unit/test_core_aio.py",
        "unit/test_core_spans.py",
        "unit/test_core_units.py",
        "unit/test_driver_config.py",
        "unit/test_driver_durability.py",
        "unit/test_driver_fsspec.py",
        "unit/test_driver_hdfs_parts.py",
        "unit/test_driver_local.py",
        "unit/test_driver_local_network.py",
        "unit/test_driver_threads.py",
        "unit/test_english.py",
        "unit/test_errors.py",
        "unit/test_layer_kinds.py",
        "unit/test_layer_retry.py",
        "unit/test_objects_failures.py",
        "unit/test_objects_options.py",
        "unit/test_objects_upload.py",
        "unit/test_parity.py",
        "unit/test_periods.py",
        "unit/test_planner_boxes.py",
    }
)
"""Paths below tests/."""

TESTS = Path(__file__).parents[1]
ADVICE = "mark the test heavy, or remove its file from tests/support/light.py"
PROCESSES = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
_running = threading.Event()
"""Set while a test runs; between tests, pytest-xdist may start processes."""


class _NoTorch:
    """A finder that refuses to import torch."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "torch":
            raise ImportError(f"a light test imports torch: {ADVICE}")
        return None


def ban() -> None:
    """Refuse torch in this process from now on, and processes and servers in tests."""
    sys.meta_path.insert(0, _NoTorch())
    sys.addaudithook(_refuse)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Refuse processes and servers during a test."""
    _running.set()
    try:
        yield
    finally:
        _running.clear()


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not _running.is_set():
        return
    if event in PROCESSES:
        raise RuntimeError(f"a light test starts a process: {ADVICE}")
    if event == "socket.bind":
        raise RuntimeError(f"a light test starts a server: {ADVICE}")


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --light."""
    parser.addoption(
        "--light", action="store_true", help="only tests that need no torch, process or server"
    )


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Ban what light tests must not use."""
    if config.getoption("light"):
        ban()


@pytest.hookimpl
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that are not listed: importing some of them would import torch."""
    if config.getoption("light") and collection_path.suffix == ".py":
        return collection_path not in {TESTS / file for file in FILES}
    return None


@pytest.hookimpl
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked heavy."""
    if config.getoption("light"):
        heavy = [item for item in items if item.get_closest_marker("heavy")]
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if not item.get_closest_marker("heavy")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Record that a test runs."""
    with running():
        return (yield)
