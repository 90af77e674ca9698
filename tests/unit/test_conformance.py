"""Run the conformance kit, as its users do, on drivers and an example that need no server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.disks import new_disk, tmpfs
from support.examples import EXAMPLES, SAVE_AND_LOAD, install, run

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


# The example packages of the guide for driver authors


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example that needs no server, and return its folder."""
    return install("holdfast-sqlite", tmp_path_factory.mktemp("example"))


@pytest.mark.nightly(28)
def test_the_example_keeps_the_contract(installed: Path, tmp_path: Path) -> None:
    """Every trial of the conformance kit passes that is not about streams or small objects; nothing is declared as a
    deviation."""
    probe = ["--driver-probe", "holdfast_sqlite.probe:SqliteProbe"]
    output = run_conformance(
        f"sqlite://{tmp_path}/try.db/below", *probe, cwd=tmp_path, path=[installed]
    )
    assert "not applicable  2\n" in output
    assert "1 × an upload is one stream" in output
    assert "1 × objects may be larger than 64 MiB" in output
    assert "deviations      0 declared, 0 cases deviated" in output


@pytest.mark.nightly(6)
def test_the_example_saves_and_loads(installed: Path, tmp_path: Path) -> None:
    """A URI is all it takes to save and load with the example."""
    run(
        [sys.executable, "-W", "error", "-c", SAVE_AND_LOAD, f"sqlite://{tmp_path}/runs.db/run"],
        installed,
    )


@pytest.mark.parametrize(
    ("example", "lines_max"), [("holdfast-sqlite", 460), ("holdfast-sftp", 260)]
)
def test_an_example_is_as_short_as_the_guide_says(example: str, lines_max: int) -> None:
    """The examples are as short as the guide says, without their probes."""
    modules = [path for path in EXAMPLES.glob(f"{example}/*/*.py") if path.name != "probe.py"]
    assert 0 < sum(len(path.read_text().splitlines()) for path in modules) < lines_max


@pytest.mark.parametrize(
    ("example", "names"),
    [
        ("holdfast-sqlite", {"contract", "options", "ranges", "threads", "uri"}),
        ("holdfast-sftp", {"asynchronous", "contract", "uri"}),
    ],
)
def test_an_example_takes_no_more_of_holdfast_than_is_for_authors(
    example: str, names: set[str]
) -> None:
    """The examples import only modules that the guide names."""
    lines = [
        line
        for path in EXAMPLES.glob(f"{example}/*/*.py")
        for line in path.read_text().splitlines()
    ]
    lines = [line.replace("from holdfast import errors", "from holdfast.errors") for line in lines]
    modules = {line.split()[1] for line in lines if line.startswith("from holdfast")}
    assert modules == {f"holdfast.drivers.{name}" for name in names} | {"holdfast.errors"}
