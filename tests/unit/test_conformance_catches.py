"""Test that the conformance kit catches drivers with one defect each, by the trial for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.broken import CASES, Healthy
from support.caught import FAULTS, scheme_of
from support.commands import finished

pytestmark = pytest.mark.timeout(240)  # on a busy machine

Outcomes = dict[str, Any]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that registers every broken driver as a third party would."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "broken-1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: broken\nVersion: 1\n"
    (folder / "broken-1.dist-info/METADATA").write_text(metadata)
    kinds = (*CASES, *FAULTS, Healthy)
    drivers = [f"{scheme_of(kind)} = support.broken:{kind.__name__}" for kind in kinds]
    plugin = "holdfast.drivers.conformance.plugin"
    lines = ["[holdfast.drivers]", *drivers, "[pytest11]", f"{plugin} = {plugin}"]
    (folder / "broken-1.dist-info/entry_points.txt").write_text("\n".join(lines))
    return folder


def env_of(site: Path) -> dict[str, str]:
    """Return an environment whose Python finds the drivers."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}


@pytest.fixture(scope="module")
def outcomes(site: Path) -> Outcomes:
    """Return the outcomes of all broken drivers, from one process."""
    command = [sys.executable, "-W", "error", "-m", "support.caught"]
    run = finished(command, cwd=site, env=env_of(site), timeout_s=220)
    assert run.returncode == 0, run.stdout + run.stderr
    found: Outcomes = json.loads(run.stdout.splitlines()[-1]) | {"output": {"text": run.stdout}}
    return found


@pytest.mark.nightly(25)
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_broken_driver_is_caught(outcomes: Outcomes, kind: type[Healthy]) -> None:
    """The trial for this defect fails."""
    assert kind.__name__ in outcomes["caught"]


@pytest.mark.parametrize(
    ("kind", "failed", "status", "says"),
    [
        ("ShortRead", ["a_read_past_the_end_is_damage"], pytest.ExitCode.TESTS_FAILED, ""),
        ("DeviationThatFails", [], pytest.ExitCode.OK, "is_damage: past the end it reads nothing"),
        ("DeviationThatPasses", [], pytest.ExitCode.TESTS_FAILED, "a deviation, but passes"),
        ("RefusesLate", [], pytest.ExitCode.OK, ""),
    ],
)
def test_failures_fail_the_run_unless_they_are_declared(
    outcomes: Outcomes, kind: str, failed: list[str], status: int, says: str
) -> None:
    """A failed trial fails the run, unless it is a declared deviation, which must not pass."""
    assert (outcomes[kind]["failed"], outcomes[kind]["status"]) == (failed, status)
    assert says in outcomes["output"]["text"]


def test_the_same_driver_without_the_fault_passes(outcomes: Outcomes) -> None:
    """The driver that all broken ones are based on passes."""
    assert set(outcomes["healthy"]) == set(CASES.values())


def test_the_report_outlives_a_failed_clean_up(outcomes: Outcomes) -> None:
    """If the clean-up fails, the run fails and still reports all results."""
    found = outcomes["DeletesNoRoots"]
    assert (found["failed"], found["status"]) == ([], pytest.ExitCode.TESTS_FAILED)
    _, _, after = outcomes["output"]["text"].partition("support.broken.DeletesNoRoots at")
    report = after.partition("support.broken.")[0]
    assert "cases passed    1" in report
    assert "LEFT BEHIND     delete_all of the kit's own prefix failed: OSError" in report
    assert "/conformance-… by other means" in report


def kit_run(site: Path, uri: str, trials: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the matching trials in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    command += ["--import-mode=importlib", "-k", trials]
    command += ["--pyargs", "holdfast.drivers.conformance", "--driver-uri", uri]
    return finished(command, cwd=site, env=env_of(site), timeout_s=110)


@pytest.mark.parametrize(
    ("kind", "passed", "failed"),
    [pytest.param("OptionsInUri", 2, 1, marks=pytest.mark.drill), ("DeletesNoRoots", 3, 0)],
)
def test_the_kit_runs_in_several_processes(site: Path, kind: str, passed: int, failed: int) -> None:
    """With pytest-xdist, one report counts all workers, and a fault of any fails the run."""
    trials = "uri_is_without_options or traits_make_sense or listing_goes"
    run = kit_run(site, f"broken-{kind.lower()}://here", trials, "-n", "2")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert f"cases passed    {passed}" in run.stdout
    assert f"cases failed    {failed}" in run.stdout
    assert ("LEFT BEHIND" in run.stdout) == (kind == "DeletesNoRoots")
