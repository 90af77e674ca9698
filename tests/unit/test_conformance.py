"""Run the conformance kit, as its users do, on drivers and the example that need no server."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import finished
from support.conformance_run import run_conformance
from support.disks import new_disk, tmpfs

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
    """A folder into which pip installed the example, without a network or building Holdfast."""
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
    """The output of a command that finds the installed package; the command succeeds."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}
    done = finished(command, cwd=installed, env=env, timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly(28)
def test_the_example_keeps_the_contract(installed: Path, tmp_path: Path) -> None:
    """Every trial that is not about streams or small objects passes, without a deviation."""
    uri, probe = f"sqlite://{tmp_path}/try.db/below", "holdfast_sqlite.probe:SqliteProbe"
    output = run_conformance(uri, "--driver-probe", probe, cwd=tmp_path, path=[installed])
    assert "not applicable  2\n" in output
    assert "1 × an upload is one stream" in output
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
