"""Run the conformance kit, as its users do, on the drivers that need no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.disks import new_disk, tmpfs

pytestmark = pytest.mark.timeout(240)  # on a busy machine


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
    """Yield a root of each kind."""
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
        yield f"lustre://{tmp_path}/root"  # its layouts are refused here, which is logged
    elif request.param == "xfs":
        with new_disk("xfs", tmp_path).mounted() as disk:
            yield f"file://{disk.folder}/root"
    elif request.param == "tmpfs":
        with tmpfs(tmp_path / "small", 1 << 30) as folder:
            yield f"file://{folder}/root"
    else:
        yield f"file://{tmp_path}/root" + ("?direct=off" if request.param == "buffered" else "")


def test_the_kit_passes(uri: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and no deviation is declared."""
    output = run_conformance(uri, cwd=tmp_path)
    assert "deviations      0 declared, 0 cases deviated" in output
