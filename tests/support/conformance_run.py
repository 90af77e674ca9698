"""Runs the conformance kit as its users run it: pytest, in a process of its own."""

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
    """The kit's output. Fails where it does. Warnings are errors; modules are also looked for in
    the folders ``path``."""
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
