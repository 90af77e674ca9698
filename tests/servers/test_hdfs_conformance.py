"""The conformance kit, run as its users run it, on a real HDFS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KIT_S = 900


@pytest.mark.drill
@pytest.mark.timeout(KIT_S + 60)
def test_the_kit_passes(hdfs_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes, also seen around the driver; one deviation is declared."""
    command = [sys.executable, "-m", "pytest", "-p", "holdfast.drivers.conformance.plugin", "-q", "-ra"]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "--pyargs", "holdfast.drivers.conformance"]
    command += ["--driver-uri", hdfs_url, "--driver-probe", "support.servers.hdfs_probe:HdfsProbe"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), *sys.path]))}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=KIT_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "cases failed    0" in run.stdout
    assert "deviations      1 declared" in run.stdout
