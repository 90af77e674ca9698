"""Runs the conformance kit as its users do: in pytest, in a separate process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .commands import finished

TESTS = Path(__file__).parents[1]


def run_conformance(
    uri: str, *options: str, cwd: Path, path: Sequence[Path] = (), timeout_s: float = 220
) -> str:
    """Return the kit's output. Fails if the kit fails. Warnings are errors. The folders ``path``
    extend the search path of modules."""
    kit = "holdfast.drivers.conformance"
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-ra", "-p", f"{kit}.plugin"]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "--pyargs", kit]
    command += ["--driver-uri", uri, *options]
    folders = [*map(str, path), str(TESTS), *filter(None, sys.path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    run = finished(command, cwd=cwd, env=env, timeout_s=timeout_s)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "cases failed    0" in run.stdout
    return run.stdout
