"""The example packages of the driver author's guide, installed as their users would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs/examples"

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


def install(name: str, folder: Path) -> Path:
    """A folder below ``folder`` into which pip installed an example, without a network and without
    building Holdfast."""
    source, target = folder / "source", folder / "target"
    shutil.copytree(
        EXAMPLES / name, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    target.mkdir()
    options = [
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
    ]
    run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        target,
    )
    return target


def run(command: list[str], installed: Path) -> str:
    """The output of a command that finds the installed package; the command succeeds."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}
    done = subprocess.run(
        command, cwd=installed, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
