"""Run each broken driver against the trial that must catch it, and print the failures as JSON.

It is a program because broken drivers leak.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.drivers import conformance
from holdfast.drivers.conformance import place
from holdfast.drivers.conformance.report import Session
from support.broken import (
    CASES,
    DeletesNoRoots,
    DeviationThatFails,
    DeviationThatPasses,
    Healthy,
    RefusesLate,
    ShortRead,
)

FAULTS: dict[type[Healthy], str] = {
    DeviationThatPasses: "an_object_comes_back",
    DeviationThatFails: CASES[ShortRead],
    DeletesNoRoots: "an_object_comes_back",
    RefusesLate: "strange_keys_are_stored_faithfully_or_refused",
    ShortRead: CASES[ShortRead],
}
"""Drivers that pytest runs: two that declare a deviation, one wrongly and one rightly; one that
fails outside of all trials; one that does not fail; one that does."""


class _Watch:
    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::test_")[2].partition("[")[0]
        if report.failed:
            self.failed.add(name)
        elif report.passed and report.when == "call":
            self.passed.add(name)


_PROBE = "holdfast.drivers.conformance.probes:MemoryProbe"


def _run(kind: type[Healthy], trial: str) -> dict[str, Any]:
    """Return the outcome of a run of pytest."""
    watch = _Watch()
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:timeout"]
    options += ["--import-mode=importlib", "-k", trial, "--pyargs"]
    driver = [
        "holdfast.drivers.conformance",
        "--driver-uri",
        f"{scheme_of(kind)}://here",
        "--driver-probe",
        _PROBE,
    ]
    status = pytest.main([*options, *driver], plugins=[watch])
    return {"status": int(status), "failed": sorted(watch.failed), "passed": sorted(watch.passed)}


@functools.cache
def _trials() -> dict[str, Callable[..., None]]:
    """Return the trials of the kit by name."""
    found = {}
    for file in sorted(Path(conformance.__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"{conformance.__name__}.{file.stem}")
        found |= {
            name.removeprefix("test_"): value
            for name, value in vars(module).items()
            if name.startswith("test_")
        }
    return found


def _is_caught(kind: type[Healthy], name: str) -> bool:
    """Return whether a trial fails. Works without pytest, which takes a second each time."""
    trial = _trials()[name]
    marks = [mark.args for mark in getattr(trial, "pytestmark", ())]
    cases = [[(names, value) for value in values] for names, values in marks]
    session = Session(f"{scheme_of(kind)}://here", _PROBE)
    for case in itertools.product(*cases):
        with pytest.MonkeyPatch.context() as patch:
            given = dict(case)
            fixtures = inspect.signature(trial).parameters
            if "monkeypatch" in fixtures:
                given["monkeypatch"] = patch
            try:
                with session.place() as root:
                    if "driver" in fixtures:
                        given["driver"] = root.open()
                    trial(root, **given)
            except (Exception, pytest.fail.Exception):  # of any kind: the trial has failed
                return True
    return False


def scheme_of(kind: type[Healthy]) -> str:
    """Return the scheme under which a class is registered."""
    return f"broken-{kind.__name__.lower()}"


def main() -> None:
    """Print the outcomes by class name, on the last line."""
    place.GRACE_S = 0.3  # leaks of these drivers never go away
    # Run pytest first: it cannot rewrite modules that are already imported.
    outcomes = {kind.__name__: _run(kind, trial) for kind, trial in FAULTS.items()}
    caught = [kind.__name__ for kind, trial in CASES.items() if _is_caught(kind, trial)]
    healthy = [trial for trial in sorted({*CASES.values()}) if not _is_caught(Healthy, trial)]
    print(f"\n{json.dumps(outcomes | {'caught': caught, 'healthy': healthy})}")


if __name__ == "__main__":
    main()
