"""A driver alone: ``holdfast bench URI --workload raw``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.bench.alone.plan import Point, grid
from holdfast.bench.alone.transfer import Shape, Transfer, parts
from holdfast.bench.measured.result import (
    Measurement,
    Phase,
    decoded,
    encoded,
)
from holdfast.cli import app
from holdfast.drivers.contract import Traits
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.uri import parse
from holdfast.errors import UsageError

MIB = 1 << 20
TRAITS = Traits(
    part_nbytes=16 * MIB,
    part_min_nbytes=1,
    align_nbytes=1,
    concurrency=16,
    coalesce_nbytes=1,
    part_order="ascending",
    exclusive_is_atomic=True,
    shared=True,
)
WRITE = Phase("write 4MiB × 8", 10**9, (1.0, 2.0, 1.0))


def test_the_grid_is_around_the_preferences_of_the_driver() -> None:
    """S3 takes no parts below 5 MiB. A driver with options for part size and concurrency is opened
    with them."""
    points = grid(S3Driver.OPTIONS, TRAITS)
    assert [point.name for point in points] == [
        f"{part}MiB × {number}" for part in (8, 16, 64) for number in (1, 16, 64)
    ]
    assert points[0].options == {"part_size": "8MiB", "concurrency": "1"}
    local = grid(LocalDriver.OPTIONS, TRAITS, [MIB], [4, 2])
    assert local == [Point(Shape(MIB, n), {"threads": str(n)}) for n in (2, 4)]
    assert grid({}, TRAITS, [7], [3]) == [Point(Shape(7, 3))]


@pytest.mark.parametrize(
    ("asked", "given", "said"),
    [
        ({"part_sizes": [MIB]}, (), "--part-sizes 1MiB is beyond .*: its option part_size"),
        ({"concurrencies": [1000]}, (), "--concurrencies 1000 is beyond"),
        ({"part_sizes": [8 * MIB]}, ("part_size",), "the URI sets part_size"),
        ({"concurrencies": [4]}, ("concurrency",), "the URI sets concurrency"),
    ],
)
def test_impossible_points_are_refused(
    asked: dict[str, list[int]], given: tuple[str, ...], said: str
) -> None:
    """The error names the argument, and gives the driver's own reason."""
    with pytest.raises(UsageError, match=said):
        grid(S3Driver.OPTIONS, TRAITS, **asked, given=given)
    with pytest.raises(UsageError, match="--part-sizes 1MiB is less than this storage takes"):
        grid({}, replace(TRAITS, part_min_nbytes=MIB + 1), [MIB])


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("writing", [False, True])
def test_parts_cover_an_object_once(random: bool, writing: bool) -> None:
    """Random order differs from the sequence, and is the same in each run."""
    shape = Shape(3 * MIB, 4, random)
    moved = parts(100 * MIB + 5, shape, replace(TRAITS, streams=4), writing=writing)
    assert parts(100 * MIB + 5, shape, replace(TRAITS, streams=4), writing=writing) == moved
    ends = [0, *(start + nbytes for start, nbytes in sorted(moved))]
    assert [start for start, _ in sorted(moved)] == ends[:-1]
    assert ends[-1] == 100 * MIB + 5
    assert (moved == sorted(moved)) == (not random and not writing)


def test_a_written_object_can_be_read(tmp_path: Path) -> None:
    """Parts have odd sizes, in sequence and in random order. Each has a latency."""
    nbytes = MIB + 4096
    for random in (False, True):
        shape = Shape(100_000, 3, random)
        moved = Transfer(parse(str(tmp_path)), "key", nbytes, shape=shape)
        moved.write()
        written = (tmp_path / "key").read_bytes()
        assert len(written) == nbytes
        assert len(moved.latencies_s) == 11
        assert np.unique(np.frombuffer(written, np.uint8)).size == 256
        moved.read()
        assert len(moved.latencies_s) == 22


def test_results_are_compared_with_their_like(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results of different workloads are refused by name."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(encoded(Measurement("file:///x", 1.9e9, {}, {}, (WRITE,))))
    b.write_text(encoded(Measurement("file:///x", 1.9e9, {"workload": "raw"}, {}, (WRITE,))))
    assert app.run(["bench", "compare", str(a), str(b)]) == 2
    assert f"a.json measures checkpoints, {b} measures raw" in capsys.readouterr().err


@pytest.mark.nightly(4)
def test_raw_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every operation at every point is in the document and the page; nothing is left."""
    page = tmp_path / "page.html"
    arguments = ["bench", str(tmp_path / "s"), "--workload", "raw", "--size", "4MiB"]
    arguments += ["--runs", "1", "--part-sizes", "1MiB,2MiB", "--concurrencies", "1,3"]
    assert app.run([*arguments, "--json", "--html", str(page)]) == 1
    found = decoded(capsys.readouterr().out, "x")
    operations = ("write", "random write", "read", "random read")
    names = [f"{what} {part}MiB × {n}" for what in operations for part in (1, 2) for n in (1, 3)]
    assert [phase.name for phase in found.phases] == names
    counts = [operations.count for each in found.phases for operations in each.operations.values()]
    assert counts == [4, 4, 2, 2] * 4
    assert all(phase.nbytes == 4 * MIB for phase in found.phases)
    assert "the object has only 2 parts; give a larger --size" in found.invalid["read 2MiB × 3"]
    assert list((tmp_path / "s").iterdir()) == []
    text = page.read_text()
    assert "INVALID" in text
    assert text.count("<svg") == 4 + len(names)
    assert "<script" not in text
