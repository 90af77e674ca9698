"""The conformance kit, run as its users run it, on the drivers that need no server."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.standins import lustre

pytestmark = pytest.mark.timeout(240)  # on a busy machine

SHM = Path("/dev/shm")


@contextmanager
def xfs(folder: Path) -> Iterator[Path]:
    """An XFS in a file, mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    if not shutil.which("mkfs.xfs"):
        pytest.skip("mkfs.xfs is not installed")
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)  # the least size that XFS takes is 300 MiB
    subprocess.run(["mkfs.xfs", "-q", str(image)], check=True, timeout=60)
    if subprocess.run(
        ["mount", "-o", "loop", str(image), str(mounted)], check=False, timeout=60
    ).returncode:
        pytest.skip("cannot mount a file here")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True, timeout=60)


@pytest.fixture(
    params=[
        pytest.param("memory", marks=pytest.mark.drill),  # the layers are above it
        "layers",
        "disk",
        "xfs",
        pytest.param("tmpfs", marks=pytest.mark.drill),
        "buffered",
        "fsspec-file",
        pytest.param("fsspec-memory", marks=pytest.mark.drill),
        "lustre",
    ]
)
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
    elif request.param == "xfs":
        with xfs(tmp_path) as mount:
            yield f"file://{mount}/root"
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
    output = run_conformance(uri, cwd=tmp_path)
    assert "deviations      0 declared, 0 cases deviated" in output
