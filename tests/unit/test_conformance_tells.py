"""The conformance kit can fail: each driver that is wrong in one way is caught by the trial that asks for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.broken import CASES, FAULTS, Healthy, scheme_of

pytestmark = pytest.mark.timeout(240)  # on a busy machine

Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What came of every broken driver, registered as a third party would, in one process of its own."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "broken-1.dist-info").mkdir()
    (folder / "broken-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    lines = [f"{scheme_of(kind)} = support.broken:{kind.__name__}" for kind in (*CASES, *FAULTS, Healthy)]
    lines = [
        "[holdfast.drivers]",
        *lines,
        "[pytest11]",
        "holdfast.drivers.conformance.plugin = holdfast.drivers.conformance.plugin",
    ]
    (folder / "broken-1.dist-info/entry_points.txt").write_text("\n".join(lines))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "error", "-m", "support.broken"]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=220, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found: Outcomes = json.loads(run.stdout.splitlines()[-1]) | {"output": {"text": run.stdout}}
    return found


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_broken_driver_is_caught(outcomes: Outcomes, kind: type[Healthy]) -> None:
    """The named trial fails, and so does the run."""
    outcome = outcomes[kind.__name__]
    assert CASES[kind] in outcome["failed"]
    assert outcome["status"] == pytest.ExitCode.TESTS_FAILED


def test_the_same_driver_without_the_fault_passes(outcomes: Outcomes) -> None:
    """It is the fault that is caught, and not the way in which it is built in."""
    outcome = outcomes["Healthy"]
    assert (outcome["failed"], outcome["status"]) == ([], pytest.ExitCode.OK)
    assert set(CASES.values()) <= set(outcome["passed"])


def test_a_declared_deviation_is_no_failure(outcomes: Outcomes) -> None:
    """It is printed with its reason, and the run passes."""
    assert (outcomes["DeviationThatFails"]["failed"], outcomes["DeviationThatFails"]["status"]) == (
        [],
        pytest.ExitCode.OK,
    )
    assert "a_read_past_the_end_is_damage: past the end it reads nothing" in outcomes["output"]["text"]


def test_a_deviation_that_passes_is_a_failure(outcomes: Outcomes) -> None:
    """Whoever mends a driver takes the declaration off."""
    assert outcomes["DeviationThatPasses"]["status"] == pytest.ExitCode.TESTS_FAILED
    assert "an_object_comes_back: declared as a deviation, and passes" in outcomes["output"]["text"]
