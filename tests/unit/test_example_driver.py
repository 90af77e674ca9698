"""The example package of the driver author's guide: it installs, keeps the contract, and saves and loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.kit import run_kit

pytestmark = pytest.mark.timeout(240)  # on a busy machine

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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the example, without a network and without building Holdfast."""
    source, target = tmp_path_factory.mktemp("source") / "example", tmp_path_factory.mktemp("target")
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)], target)
    return target


def run(command: list[str], installed: Path) -> str:
    """The output of a command that finds the installed package; the command succeeds."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=installed, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_keeps_the_contract(installed: Path, tmp_path: Path) -> None:
    """Every trial of the conformance kit passes that is not about streams; nothing is declared as a deviation."""
    probe = ["--driver-probe", "holdfast_sqlite.probe:SqliteProbe"]
    output = run_kit(f"sqlite://{tmp_path}/try.db/below", *probe, cwd=tmp_path, path=[installed])
    assert "not applicable  1\n    1 × an upload is one stream" in output
    assert "deviations      0 declared, 0 cases deviated" in output


def test_the_example_saves_and_loads(installed: Path, tmp_path: Path) -> None:
    """Nothing but the URI tells Holdfast where to go."""
    run([sys.executable, "-W", "error", "-c", SAVE_AND_LOAD, f"sqlite://{tmp_path}/runs.db/run"], installed)


def test_the_example_takes_no_more_of_holdfast_than_is_for_authors(installed: Path) -> None:
    """What it imports is what the guide names: contract, options, ranges, threads, uri, errors."""
    lines = [line for path in (installed / "holdfast_sqlite").glob("*.py") for line in path.read_text().splitlines()]
    modules = {line.split()[1] for line in lines if line.startswith("from holdfast")}
    public = {f"holdfast.drivers.{name}" for name in ("contract", "options", "ranges", "threads", "uri")}
    assert modules == public | {"holdfast.errors"}
