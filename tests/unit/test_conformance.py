"""The conformance kit, run as its users run it, on the drivers that need no server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.standins import lustre

import holdfast

SHM = Path("/dev/shm")
KIT = Path(holdfast.__file__).parent / "drivers/conformance"


def run_kit(uri: str, *options: str, cwd: Path) -> tuple[int, str]:
    """The kit's exit status and output. Warnings are errors."""
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "holdfast.drivers.conformance.plugin", "-q", "-ra"]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "--pyargs", "holdfast.drivers.conformance"]
    command += ["--driver-uri", uri, *options]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False)
    return run.returncode, run.stdout + run.stderr


@pytest.fixture(params=["memory", "layers", "disk", "buffered", "tmpfs", "fsspec-file", "fsspec-memory", "lustre"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A root of each kind."""
    if request.param == "memory":
        yield "memory://conformance"
    elif request.param == "layers":
        yield (
            "memory://layered?metrics=on&max_concurrency=4&max_bytes_per_s=10GB&retries=3&op_timeout_s=60&hedge_percent=5"
        )
    elif request.param == "fsspec-memory":
        yield "fsspec+memory://conformance"
    elif request.param == "fsspec-file":
        yield f"fsspec+file://{tmp_path}/root"
    elif request.param == "lustre":
        with lustre(tmp_path) as mount:
            yield f"lustre://{mount}/root?stripe_count=4&stripe_size=64KiB"
    elif request.param == "tmpfs":
        if not SHM.is_dir():
            pytest.skip("no /dev/shm here")
        folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=SHM))
        yield f"file://{folder}/root"
        assert list((folder / "root").iterdir()) == []
        shutil.rmtree(folder)
    else:
        yield f"file://{tmp_path}/root" + ("?direct=off" if request.param == "buffered" else "")


def test_the_kit_passes(uri: str, tmp_path: Path) -> None:
    """Every trial that applies passes, nothing is declared as a deviation, and the report says so."""
    status, output = run_kit(uri, cwd=tmp_path)
    assert status == 0, output
    assert "cases failed    0" in output
    assert "deviations      0 declared, 0 cases deviated" in output
