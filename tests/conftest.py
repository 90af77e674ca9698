"""Fixtures for all tests, and a summary of skipped tests."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from support.effort import EFFORT, tried

ROOT = Path(__file__).parents[1]

pytest_plugins = ["support.clocked", "support.given", "support.light", "support.nightly"]

# pytest limits the time of a test. A deadline per example would only fail on a busy machine.
settings.register_profile("holdfast", deadline=None, max_examples=tried(100))
# On CI, hypothesis has its own profile: the same examples every time, and no deadline either.
settings.register_profile("holdfast-ci", settings.get_profile("ci"), max_examples=tried(100))
settings.load_profile("holdfast-ci" if "CI" in os.environ and EFFORT <= 1 else "holdfast")


# The machine's settings for storage must not affect the tests, nor the processes that they start.
for name in [
    n for n in os.environ if n.startswith("HOLDFAST_") and not n.startswith("HOLDFAST_TEST_")
]:
    del os.environ[name]
os.environ["HOLDFAST_CONFIG"] = ""


class _Root:
    """Collects the root as a plain folder. pytest would treat it as a package, because it has an
    ``__init__.py``, and import it by the folder's name; a clone may have any name."""

    @pytest.hookimpl
    def pytest_collect_directory(
        self, path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        """Collect the root, and leave other folders to pytest."""
        if path != ROOT:
            return None
        return pytest.Dir.from_parent(parent, path=path)


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin: hooks of this file are not called for folders above it."""
    config.pluginmanager.register(_Root())


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return a number that differs between tests but not between runs of one test."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Return random numbers that differ between tests but not between runs of one test."""
    return np.random.default_rng(seed)


@pytest.fixture
def no_write_history() -> Iterator[None]:
    """Forget what lazy saves have learned about tensors in other tests."""
    import holdfast
    from holdfast.storage.state.capture.write_watch import write_history

    write_history.forget()
    yield
    holdfast.fence()
    write_history.forget()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test if a file descriptor or a thread that it opened outlives it by more than two
    seconds."""
    descriptors, threads = _open_descriptors(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2
    while True:
        left = {fd: path for fd, path in _open_descriptors().items() if descriptors.get(fd) != path}
        alive = [thread.name for thread in threading.enumerate() if thread not in threads]
        if not left and not alive:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left open: {sorted(left.values())}; still running: {sorted(alive)}")
        time.sleep(0.01)


def _open_descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of skipped tests per reason, and the messages that tests left in a property
    "said"."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "said":
                terminalreporter.write_line(str(value))
    reports = terminalreporter.stats.get("skipped", [])
    # A skip's longrepr is (path, line, "Skipped: reason"); an expected failure's is something else.
    reasons = Counter(
        r.longrepr[2].removeprefix("Skipped: ") for r in reports if isinstance(r.longrepr, tuple)
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    seconds = _seconds_by_file(terminalreporter)
    if len(seconds) > 1:
        terminalreporter.section(f"seconds by file, {sum(seconds.values()):.0f} in all")
        for file, spent in seconds.most_common(40):
            terminalreporter.write_line(f"{spent:7.1f}  {file}")


def _seconds_by_file(terminalreporter: pytest.TerminalReporter) -> Counter[str]:
    """Return the time spent in the tests of each file, fixtures included."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    return seconds
