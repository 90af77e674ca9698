"""The conformance kit, run on drivers and the example that need no server, and on broken ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broken import CASES, Healthy
from support.caught import FAULTS, scheme_of
from support.commands import finished
from support.conformance_run import run_conformance
from support.disks import new_disk, tmpfs
from support.given import install

EXAMPLE = Path(__file__).parents[2] / "docs/examples/holdfast-sqlite"

SAVE_AND_LOAD = """
import sys, numpy, torch, holdfast
uri = sys.argv[1]
state = {"weight": torch.arange(3 << 20, dtype=torch.float32), "step": 7}
for step in (1, 2):
    holdfast.save(f"{uri}/step-{step}", state)
target = {"weight": torch.zeros(3 << 20), "step": 0}
holdfast.load(f"{uri}/step-2", into=target)
assert torch.equal(target["weight"], state["weight"]) and target["step"] == 7
with holdfast.open(f"{uri}/step-1") as checkpoint:
    assert checkpoint.verify().ok
    assert torch.equal(checkpoint.read("weight", slice(5, 900_000)), state["weight"][5:900_000])
assert [found.path for found in holdfast.list_checkpoints(uri)] == ["step-1", "step-2"]
"""
"""A program: saves to a URI, and loads from it."""

pytestmark = pytest.mark.timeout(240)  # on a busy machine


LAYERS = (
    "metrics=on&max_concurrency=4&max_bytes_per_s=10GB&retries=3&op_timeout_s=60&hedge_percent=5"
)
ROOTS = {
    "memory": "memory://conformance",
    "layers": f"memory://layered?{LAYERS}",
    "disk": "file://{folder}/root",
    "buffered": "file://{folder}/root?direct=off",
    "fsspec-file": "fsspec+file://{folder}/root",
    "fsspec-memory": "fsspec+memory://conformance",
    "lustre": "lustre://{folder}/root",  # its layouts are refused here, which is logged
}
DRILLS = ("memory", "fsspec-memory", "tmpfs")  # the layers are above memory


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.drill] if name in DRILLS else [])
        for name in (*ROOTS, "xfs", "tmpfs")
    ]
)
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield a root of each kind."""
    if request.param == "xfs":
        with new_disk("xfs", tmp_path).mounted() as disk:
            yield f"file://{disk.folder}/root"
    elif request.param == "tmpfs":
        with tmpfs(tmp_path / "small", 1 << 30) as folder:
            yield f"file://{folder}/root"
    else:
        yield ROOTS[request.param].format(folder=tmp_path)


def test_the_kit_passes(uri: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and no deviation is declared."""
    output = run_conformance(uri, cwd=tmp_path)
    assert "deviations      0 declared, 0 cases deviated" in output


# The example package of the guide for driver authors


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example with pip, without a network or building Holdfast; return the folder."""
    folder = tmp_path_factory.mktemp("example")
    source, target = folder / "source", folder / "target"
    unwanted = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(EXAMPLE, source, ignore=unwanted)
    target.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation"]
    _run([*pip, "--target", str(target), str(source)], target)
    return target


def _run(command: list[str], installed: Path) -> str:
    """Return the output of a command that finds the installed package and succeeds."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}
    done = finished(command, cwd=installed, env=env, timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly(28)
def test_the_example_keeps_the_contract(installed: Path, tmp_path: Path) -> None:
    """Every trial that is not about streams, copies, links or small objects passes, without a deviation."""
    uri, probe = f"sqlite://{tmp_path}/try.db/below", "holdfast_sqlite.probe:SqliteProbe"
    output = run_conformance(uri, "--driver-probe", probe, cwd=tmp_path, path=[installed])
    assert "not applicable  12\n" in output
    assert "1 × an upload is one stream" in output
    assert "7 × the storage copies no ranges" in output
    assert "3 × an object has one key" in output
    assert "1 × objects may be larger than 64 MiB" in output
    assert "deviations      0 declared, 0 cases deviated" in output


@pytest.mark.nightly(6)
def test_the_example_saves_and_loads(installed: Path, tmp_path: Path) -> None:
    """A URI is all it takes to save and load with the example."""
    program = [sys.executable, "-W", "error", "-c", SAVE_AND_LOAD]
    _run([*program, f"sqlite://{tmp_path}/runs.db/run"], installed)


def test_the_example_is_as_short_as_the_guide_says() -> None:
    """The example is as short as the guide says, without its probe."""
    modules = [path for path in EXAMPLE.glob("*/*.py") if path.name != "probe.py"]
    assert 0 < sum(len(path.read_text().splitlines()) for path in modules) < 400


def test_the_example_takes_no_more_of_holdfast_than_is_for_authors() -> None:
    """The example imports only modules that the guide names."""
    text = "\n".join(path.read_text() for path in EXAMPLE.glob("*/*.py"))
    modules = set(re.findall(r"^from (holdfast\S*)", text, re.MULTILINE))
    names = {"asynchronous", "contract", "options", "threads", "uri"}
    assert modules == {f"holdfast.drivers.{name}" for name in names} | {"holdfast.errors"}


# Drivers with one defect each


Outcomes = dict[str, Any]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that registers every broken driver as a third party would."""
    kinds = (*CASES, *FAULTS, Healthy)
    drivers = [f"{scheme_of(kind)} = support.broken:{kind.__name__}" for kind in kinds]
    plugin = "holdfast.drivers.conformance.plugin"
    folder = tmp_path_factory.mktemp("site")
    return install(folder, *drivers, "[pytest11]", f"{plugin} = {plugin}")


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
    """Run the matching trials in a separate process."""
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
