"""One run of the kit: the driver under test, the results of its trials, and the final report."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..contract import Driver
from ..registry import driver_class, opened_driver, serving
from ..uri import Uri, join, parse
from .place import BARE, Place, held_now
from .probes import probe_class

_RESULTS = "holdfast_conformance"
"""Key under which a pytest-xdist worker sends its results to the controller."""

OUTLIVES = "nothing_outlives_close"
"""Trial that checks what close() releases. Unless the driver declares it as a deviation, the same
check follows every trial."""

TIDY_EVERY = 20
"""Number of places removed together: removing takes a new driver, and connecting may be the slowest
part."""

REMOVAL_TIMEOUT_S = 300.0
"""Time limit for removing places, in seconds."""


class Session:
    """A run against the driver of ``--driver-uri``, below its own prefix. Acts as a pytest plugin.

    With pytest-xdist, each worker has its own session and prefix; the controller's session only
    counts.
    """

    def __init__(self, uri: str, probe: str | None, *, worker: bool = False) -> None:
        """Open the driver and store a small object. This creates everything the driver caches per
        process.

        ``worker`` marks a pytest-xdist worker, whose controller reports. Raises UsageError for a
        URI that cannot be opened or a probe that cannot be imported.
        """
        parsed = parse(uri)
        self._worker = worker
        self._probe = probe_class(parsed.scheme, probe)
        self._name = f"conformance-{secrets.token_hex(4)}"
        self._root = parsed
        self._below = join(parsed, self._name)
        self._places = 0
        self._began_s = time.monotonic()
        driver = asyncio.run(_used(parsed, self._name))
        self.driver = _name_of(parsed)
        self.uri = driver.uri
        self.traits = driver.traits
        self.deviations = dict(driver.deviations)
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._not_applicable: Counter[str] = Counter()
        self._all_collected = False
        self._untidy: list[str] = []
        self._left: list[str] = []
        self._opened = 0

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Provide an empty root, which is removed some time later. Then close its drivers, and fail
        if they left anything open, even if garbage collection would close it sooner or later."""
        if len(self._untidy) >= TIDY_EVERY:
            self._remove(self._below, self._untidy)
            self._untidy = []
        self._places += 1
        name = f"{self._places:03d}"
        self._untidy.append(name)
        held = held_now()
        with _without_collection():
            place = Place(join(self._below, name), self._probe, self.traits)
            try:
                yield place
            finally:
                self._opened += place.opened
                place.close()
            if OUTLIVES not in self.deviations and (left := held.outlived_by()):
                pytest.fail(f"these outlive close(): {', '.join(left)}")

    def _remove(self, root: Uri, prefixes: Iterable[str]) -> None:
        """Remove these prefixes. A failure is reported at the end and fails the run, but does not
        interrupt it."""
        try:
            asyncio.run(_remove(root, prefixes))
        except Exception as error:  # any kind of error: the report matters more
            self._left.append(f"{type(error).__name__}: {error}")

    def collected(self, nodeids: Iterable[str], folder: Path) -> None:
        """Record the trials. Whether a declared name exists is only known if all modules were
        collected."""
        modules = {path.name for path in folder.glob("test_*.py")}
        seen = set()
        for nodeid in nodeids:
            path, _, name = nodeid.partition("::")
            module = path.rpartition("/")[2]
            if module in modules:
                seen.add(module)
                self._outcomes[_trial_called(name)] += Counter()
        self._all_collected = seen == modules

    def judge(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Turn a declared failure into an expected one, and record the trial's name in the
        report."""
        name = _trial_called(str(getattr(item, "originalname", None) or item.name))
        report.holdfast_trial = name  # type: ignore[attr-defined]  # pytest-xdist hands on what a report holds
        if report.failed and name in self.deviations:
            report.outcome = "skipped"
            report.wasxfail = self.deviations[name]  # the same attribute that pytest sets for xfail

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one test report."""
        name = getattr(report, "holdfast_trial", None)
        if name is None:
            return
        if report.failed:
            self._outcomes[name]["failed"] += 1
        elif report.skipped and hasattr(report, "wasxfail"):
            self._outcomes[name]["deviated"] += 1
        elif report.skipped:
            self._outcomes[name]["not applicable"] += 1
            self._not_applicable[_reason_of(report)] += 1
        elif report.passed and report.when == "call":
            self._outcomes[name]["passed"] += 1

    def faults(self) -> list[str]:
        """Return the errors in the driver's declared deviations: trials that pass or do not
        exist."""
        faults = []
        for name in self.deviations:
            if name not in self._outcomes:
                faults += [f"{name}: there is no such trial"] if self._all_collected else []
            elif self._outcomes[name]["passed"] and not self._outcomes[name]["deviated"]:
                faults.append(
                    f"{name}: declared as a deviation, but passes: remove it from the driver's list"
                )
        return faults

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Record the trials that a worker collected: the controller collects none."""
        self.collected(ids, Path(__file__).parent)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect the results of a pytest-xdist worker."""
        results = getattr(node, "workeroutput", {}).get(_RESULTS, {})
        self._left += results.get("left", [])
        self._opened += results.get("opened", 0)

    @pytest.hookimpl(trylast=True)  # pytest-xdist workers also end in this hook
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Remove the prefix. Fails the run if that fails, or if a declared deviation is wrong."""
        self._remove(self._root, [self._name])
        if self._worker:
            session.config.workeroutput[_RESULTS] = {"left": self._left, "opened": self._opened}  # type: ignore[attr-defined]
        elif (self.faults() or self._left) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the report."""
        terminalreporter.section("Holdfast driver conformance")
        for line in self.report():
            terminalreporter.write_line(line)

    def report(self) -> Iterator[str]:
        """Yield the lines of the report: driver, traits, counts, reasons."""
        counts = sum(self._outcomes.values(), Counter())
        yield f"driver          {self.driver} at {self.uri}"
        traits = (f"{name}={value}" for name, value in dataclasses.asdict(self.traits).items())
        yield f"traits          {', '.join(traits)}"
        yield (
            f"probe           "
            f"{getattr(self._probe, '__name__', 'none: read-back is by a second driver')}"
        )
        yield f"cases passed    {counts['passed']}"
        yield f"cases failed    {counts['failed']}"
        yield f"not applicable  {counts['not applicable']}"
        yield from (
            f"    {count} × {reason}" for reason, count in sorted(self._not_applicable.items())
        )
        yield (
            f"deviations      {len(self.deviations)} declared, {counts['deviated']} cases deviated"
        )
        yield from (f"    {name}: {reason}" for name, reason in sorted(self.deviations.items()))
        yield (
            f"time            {time.monotonic() - self._began_s:.0f} s; {self._opened} "
            f"drivers opened"
        )
        yield from (f"FAULT           {fault}" for fault in self.faults())
        for left in self._left:
            yield f"LEFT BEHIND     delete_all of the kit's own prefix failed: {left}"
        if self._left:
            yield f"                remove what lies at {self.uri}/conformance-… by other means"


@contextmanager
def _without_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _trial_called(name: str) -> str:
    """Return the name of the trial that the item called ``name`` is a case of."""
    return name.partition("[")[0].removeprefix("test_")


def _reason_of(report: pytest.TestReport) -> str:
    # A tuple of path, line and reason, which pytest-xdist turns into a list.
    where = report.longrepr
    if isinstance(where, tuple | list):
        where = where[2]
    reason = str(where)
    return reason.removeprefix("Skipped: ").removeprefix("not applicable: ")


def _name_of(uri: Uri) -> str:
    cls = driver_class(serving(uri))
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"


async def _used(uri: Uri, name: str) -> Driver:
    """Return the driver, closed, after it has stored and read an object."""
    async with opened_driver(uri, **BARE) as driver:
        await driver.put(f"{name}/warm", b"up")
        await driver.get(f"{name}/warm")
        return driver


async def _remove(root: Uri, prefixes: Iterable[str]) -> None:
    async with opened_driver(root) as driver, asyncio.timeout(REMOVAL_TIMEOUT_S):
        for prefix in prefixes:
            await driver.delete_all(prefix)
