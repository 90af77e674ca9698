"""One run of the kit: the driver under trial, what came of each trial, and the report at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..contract import Driver
from ..registry import driver_class, open_driver, serving
from ..uri import Uri, join, parse
from .place import BARE, Held, Place, held_now
from .probes import probe_class

__all__ = ["OUTLIVES", "Session"]

OUTLIVES = "nothing_outlives_close"
"""The trial of what close() lets go; while a driver does not deviate there, the same is looked at after every trial."""


class Session:
    """The driver of ``--driver-uri``, tried below a prefix of its own. A pytest plugin while it runs."""

    def __init__(self, uri: str, probe: str | None) -> None:
        """Opens the driver once and stores a small object, so that what it keeps for the process is there from now on.

        Raises UsageError for a URI that cannot be opened, or a probe that cannot be imported.
        """
        parsed = parse(uri)
        self._probe = probe_class(parsed.scheme, probe)
        self._name = f"conformance-{secrets.token_hex(4)}"
        self._root, self._below, self._places = parsed, join(parsed, self._name), 0
        driver = open_driver(parsed, **BARE)
        self.driver, self.uri, self.traits = _name_of(parsed), driver.uri, driver.traits
        self.deviations = dict(driver.deviations)
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._not_applicable: Counter[str] = Counter()
        self._all_collected = False
        asyncio.run(_warm_up(driver, self._name))

    @contextmanager
    def place(self) -> Iterator[tuple[Held, Place]]:
        """An empty root, removed afterwards, and what the process held before."""
        self._places += 1
        name, held = f"{self._places:03d}", held_now()
        place = Place(join(self._below, name), self._probe, self.traits)
        try:
            yield held, place
        finally:
            place.close()
            asyncio.run(_remove(open_driver(self._below), name))

    def collected(self, items: list[pytest.Item], folder: Path) -> None:
        """Note the trials; whether a declared name exists can be told only where every module was collected."""
        ours = [item for item in items if item.path.parent == folder]
        for item in ours:
            self._outcomes[trial_of(item)] = Counter()
        self._all_collected = {item.path for item in ours} == set(folder.glob("test_*.py"))

    def judge(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Count one report, and turn a declared failure into an expected one."""
        name = trial_of(item)
        if report.failed and name in self.deviations:
            report.outcome = "skipped"
            report.wasxfail = self.deviations[name]  # as pytest itself does
            self._outcomes[name]["deviated"] += 1
        elif report.failed:
            self._outcomes[name]["failed"] += 1
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._outcomes[name]["not applicable"] += 1
            self._not_applicable[report.longrepr[2].removeprefix("Skipped: ").removeprefix("not applicable: ")] += 1
        elif report.passed and report.when == "call":
            self._outcomes[name]["passed"] += 1

    def faults(self) -> list[str]:
        """What is wrong with what the driver declares: a deviation whose trial passed, or whose trial does not exist."""
        faults = []
        for name in self.deviations:
            if name not in self._outcomes:
                faults += [f"{name}: there is no such trial"] if self._all_collected else []
            elif self._outcomes[name]["passed"] and not self._outcomes[name]["deviated"]:
                faults.append(f"{name}: declared as a deviation, and passes: take it off the driver's list")
        return faults

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Remove the prefix; a wrong declaration fails the run."""
        asyncio.run(_remove(open_driver(self._root), self._name))
        if self.faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The report."""
        terminalreporter.section("Holdfast driver conformance")
        for line in self.report():
            terminalreporter.write_line(line)

    def report(self) -> Iterator[str]:
        """Its lines: driver, traits, counts, reasons."""
        counts = sum(self._outcomes.values(), Counter())
        yield f"driver          {self.driver} at {self.uri}"
        yield f"traits          {', '.join(f'{name}={value}' for name, value in dataclasses.asdict(self.traits).items())}"
        yield f"probe           {getattr(self._probe, '__name__', 'none: read-back is by a second driver')}"
        yield f"cases passed    {counts['passed']}"
        yield f"cases failed    {counts['failed']}"
        yield f"not applicable  {counts['not applicable']}"
        yield from (f"    {count} × {reason}" for reason, count in sorted(self._not_applicable.items()))
        yield f"deviations      {len(self.deviations)} declared, {counts['deviated']} cases deviated"
        yield from (f"    {name}: {reason}" for name, reason in sorted(self.deviations.items()))
        yield from (f"FAULT           {fault}" for fault in self.faults())


def trial_of(item: pytest.Item) -> str:
    """The trial that an item is a case of."""
    return str(getattr(item, "originalname", None) or item.name).removeprefix("test_")


def _name_of(uri: Uri) -> str:
    """The class that serves a URI, whatever layers stand before it."""
    cls = driver_class(serving(uri))
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"


async def _warm_up(driver: Driver, name: str) -> None:
    await driver.put(f"{name}/warm", b"up")
    await driver.get(f"{name}/warm")
    await driver.close()


async def _remove(driver: Driver, prefix: str) -> None:
    await driver.delete_all(prefix)
    await driver.close()
